// The directory for Python: `p2pcache.core.directory.Directory` stands on this.

#include "directory.h"

#include <cmath>

#include "directory_py.h"

namespace nb = nanobind;
using namespace p2pcache;

namespace {

constexpr size_t TEXT_BYTES_MAX = 1024;

std::string text_of(nb::handle value) {
    Py_ssize_t size = 0;
    const char *utf8 = PyUnicode_AsUTF8AndSize(value.ptr(), &size);
    if (!utf8) nb::raise_python_error();
    if (static_cast<size_t>(size) > TEXT_BYTES_MAX) throw nb::value_error("a name is at most 1024 bytes");
    return {utf8, static_cast<size_t>(size)};
}

int64_t integer(nb::handle value) {
    const long long got = PyLong_AsLongLong(value.ptr());
    if (got == -1 && PyErr_Occurred()) nb::raise_python_error();
    return got;
}

nb::object field(nb::handle of, Py_ssize_t index) {
    PyObject *got = PySequence_GetItem(of.ptr(), index);
    if (!got) nb::raise_python_error();
    return nb::steal(got);
}

uint8_t small(nb::handle value) {
    const int64_t got = integer(value);
    if (got < 0 || got > 255) throw nb::value_error("a provenance is a small number");
    return static_cast<uint8_t>(got);
}

void check_time(double now_s) {
    if (!std::isfinite(now_s)) throw nb::value_error("the time must be finite");
}

size_t keys_in(const nb::bytes &contents) {
    if (contents.size() % KEY_BYTES) throw nb::value_error("a key is 16 bytes");
    return contents.size() / KEY_BYTES;
}

class PyDirectory : public DirectoryHandle {
public:
    PyDirectory(double ttl_s, double tombstone_s, size_t bodies_max) {
        if (bodies_max < 1) throw nb::value_error("bodies_max must be above 0");
        shared = std::make_shared<Directory>(ttl_s, tombstone_s, bodies_max);
    }

    size_t publish(nb::str name, int64_t incarnation, int tier, nb::iterable bodies, double now_s) {
        check_idle();
        check_time(now_s);
        if (tier < 0 || tier > 255) throw nb::value_error("a tier is a small number");
        const Directory::Use holder(*shared, text_of(name), incarnation);
        size_t accepted = 0;
        for (nb::handle item : bodies) {
            // All of Python is over before the first change, so a bad body changes nothing.
            const nb::object info = field(item, 0);
            const int64_t seq = integer(field(item, 1));
            BodySaid said;
            said.content = key_of(info.attr("content"));
            said.exact = key_of(info.attr("exact"));
            said.tokens = integer(info.attr("tokens"));
            said.nbytes = integer(info.attr("nbytes"));
            said.base_position = integer(info.attr("base_position"));
            said.provenance = small(info.attr("provenance"));
            const nb::object codec = info.attr("codec");
            if (!PyUnicode_Check(codec.ptr())) throw nb::value_error("a codec is named by text");
            said.codec = text_of(codec);
            check_idle();
            accepted += shared->publish(holder, static_cast<uint8_t>(tier), said, seq, now_s);
        }
        return accepted;
    }

    size_t withdraw(nb::str name, int64_t incarnation, nb::iterable bodies, double now_s) {
        check_idle();
        check_time(now_s);
        const Directory::Use holder(*shared, text_of(name), incarnation);
        size_t accepted = 0;
        for (nb::handle item : bodies) {
            const Key content = key_of(field(item, 0)), exact = key_of(field(item, 1));
            const int64_t seq = integer(field(item, 2));
            check_idle();
            accepted += shared->withdraw(holder, content, exact, seq, now_s);
        }
        return accepted;
    }

    // `is_live` is Python, so it is asked before the table is locked, once a holder and call.
    nb::tuple table(nb::bytes contents, double now_s, nb::callable is_live) {
        check_time(now_s);
        const size_t count = keys_in(contents);
        const Reading reading(*this);
        std::unordered_map<uint32_t, bool> live;
        for (const auto &[id, name, incarnation] : shared->holders(contents.c_str(), count)) {
            const int answer = PyObject_IsTrue(is_live(name, incarnation).ptr());
            if (answer < 0) nb::raise_python_error();
            live[id] = answer;
        }
        return as_tuple(shared->table(contents.c_str(), count, now_s,
                                      [&](uint32_t id, const std::string &, int64_t) { return live[id]; }));
    }

    size_t expire(double now_s, size_t batch_max) {
        check_time(now_s);
        check_idle();
        return shared->expire(now_s, batch_max);
    }

    size_t holders() const { return shared->holders(); }
    size_t keys() const { return shared->keys(); }
    size_t nbytes() const { return shared->nbytes(); }

private:
    // It must not change under us what we are reading.
    struct Reading {
        explicit Reading(PyDirectory &d) : d(d) { ++d.reading_; }
        ~Reading() { --d.reading_; }
        PyDirectory &d;
    };
    void check_idle() const {
        if (reading_) throw std::runtime_error("the directory cannot change while a lookup runs");
    }
    int reading_ = 0;
};

}  // namespace

void bind_directory(nb::module_ &m) {
    nb::class_<DirectoryHandle>(m, "DirectoryHandle", "A directory that native threads may read.");
    nb::class_<PyDirectory, DirectoryHandle>(m, "Directory",
                                             "The table behind `p2pcache.core.directory.Directory`.")
        .def(nb::init<double, double, size_t>(), nb::arg("ttl_s"), nb::arg("tombstone_s"), nb::arg("bodies_max"))
        .def("publish", &PyDirectory::publish, nb::arg("name"), nb::arg("incarnation"), nb::arg("tier"),
             nb::arg("bodies"), nb::arg("now_s"))
        .def("withdraw", &PyDirectory::withdraw, nb::arg("name"), nb::arg("incarnation"), nb::arg("bodies"),
             nb::arg("now_s"))
        .def("table", &PyDirectory::table, nb::arg("contents"), nb::arg("now_s"), nb::arg("is_live"))
        .def("expire", &PyDirectory::expire, nb::arg("now_s"), nb::arg("batch_max"))
        .def("__len__", &PyDirectory::keys)
        .def_prop_ro("holders", &PyDirectory::holders, "How many holders it knows by name.")
        .def_prop_ro("nbytes", &PyDirectory::nbytes, "Bytes of its tables; names are not counted.");
}

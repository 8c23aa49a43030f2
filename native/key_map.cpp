// Maps from 16-byte keys to Python objects: `KeyMap` does what `OrderedDict[bytes, object]` does, in 40 bytes
// an entry, its key included, instead of 190; `KeyIndex` has no order, and takes 32. Their twins in the tests
// are `OrderedDict` and `dict`.

#include "table.h"

namespace nb = nanobind;
using namespace p2pcache;

namespace {

template <bool ordered> struct Order {
    uint32_t before, after;
};
template <> struct Order<false> {};

// Of 32-bit words alone, so that no node is padded.
template <bool ordered> class NodeOf : public Order<ordered> {
public:
    Key key() const { return read<Key>(key_); }
    void set_key(const Key &key) { std::memcpy(key_, &key, sizeof key); }
    PyObject *value() const { return read<PyObject *>(value_); }  // a reference of ours; null in a free node
    void set_value(PyObject *value) { std::memcpy(value_, &value, sizeof value); }

private:
    template <typename T> static T read(const uint32_t *words) {
        T found;
        std::memcpy(&found, words, sizeof found);
        return found;
    }
    uint32_t key_[4] = {}, value_[sizeof(PyObject *) / 4] = {};

public:
    uint32_t next = NONE;  // in the chain of its bucket
};
static_assert(sizeof(NodeOf<true>) == 36 && sizeof(NodeOf<false>) == 28);

[[noreturn]] void missing(nb::handle key) {
    PyErr_SetObject(PyExc_KeyError, key.ptr());
    nb::raise_python_error();
}

template <bool ordered> class Map {
public:
    using Node = NodeOf<ordered>;

    Map() = default;
    Map(const Map &) = delete;
    ~Map() { clear(); }

    size_t size() const { return count_; }
    size_t nbytes() const { return nodes_.nbytes() + buckets_.nbytes(); }

    // A key that could not be in here is not in here, whatever it is.
    bool contains(nb::handle key) { return find(key) != NONE; }
    nb::object get(nb::handle key, nb::object otherwise) {
        const uint32_t i = find(key);
        return i == NONE ? otherwise : nb::borrow(nodes_[i].value());
    }
    nb::object at(nb::handle key) {
        const uint32_t i = find(key);
        if (i == NONE) missing(key);
        return nb::borrow(nodes_[i].value());
    }

    void set(nb::handle raw, nb::object value) {
        const Key key = key_of(raw);
        if (const uint32_t i = find(raw); i != NONE) {
            PyObject *old = nodes_[i].value();
            nodes_[i].set_value(value.release().ptr());
            Py_DECREF(old);  // may run anything, so it comes last
            return;
        }
        while (buckets_.size() <= count_)
            buckets_.grow(nodes_, [](const Node &node) { return node.key().hash(); });
        const uint32_t i = nodes_.take();
        uint32_t &head = buckets_.head(key.hash());
        Node &node = nodes_[i];
        node.set_key(key);
        node.set_value(value.release().ptr());
        node.next = head;
        head = i;
        if constexpr (ordered) append(i);
        ++count_;
        ++changes_;
    }

    nb::object pop(nb::handle key) {
        const uint32_t i = find(key);
        if (i == NONE) missing(key);
        return take(i);
    }
    nb::object pop_or(nb::handle key, nb::object otherwise) {
        const uint32_t i = find(key);
        return i == NONE ? otherwise : take(i);
    }
    nb::tuple pop_item(bool last) {
        const uint32_t i = last ? last_ : first_;
        if (i == NONE) throw nb::key_error("the map is empty");
        const nb::bytes key = bytes_of(nodes_[i].key());
        return nb::make_tuple(key, take(i));
    }
    void move_to_end(nb::handle key, bool last) {
        const uint32_t i = find(key);
        if (i == NONE) missing(key);
        detach(i);
        last ? append(i) : prepend(i);
        ++changes_;
    }
    void clear() {
        for (uint32_t i = 0; i < nodes_.end(); ++i)
            if (nodes_[i].value()) take(i);
    }

    // One step of an iteration that began when there had been `changes` of them. NONE starts it.
    uint32_t step(uint32_t i, bool reversed, uint64_t changes) const {
        if (changes != changes_) throw std::runtime_error("the map changed during an iteration");
        if (i == NONE) return reversed ? last_ : first_;
        return reversed ? nodes_[i].before : nodes_[i].after;
    }
    uint64_t changes() const { return changes_; }
    const Node &at_index(uint32_t i) const { return nodes_[i]; }

    int traverse(visitproc visit, void *arg) {
        for (uint32_t i = 0; i < nodes_.end(); ++i) Py_VISIT(nodes_[i].value());
        return 0;
    }

private:
    uint32_t find(nb::handle raw) {
        if (!is_key(raw)) return NONE;
        const Key key = key_of(raw);
        uint32_t i = buckets_.head(key.hash());
        while (i != NONE && !(nodes_[i].key() == key)) i = nodes_[i].next;
        return i;
    }
    // Out of the map; the reference is the caller's.
    nb::object take(uint32_t i) {
        uint32_t *link = &buckets_.head(nodes_[i].key().hash());
        while (*link != i) link = &nodes_[*link].next;
        *link = nodes_[i].next;
        if constexpr (ordered) detach(i);
        nb::object value = nb::steal(nodes_[i].value());
        nodes_.give_back(i);
        --count_;
        ++changes_;
        return value;
    }
    void detach(uint32_t i) {
        const Node &node = nodes_[i];
        (node.before == NONE ? first_ : nodes_[node.before].after) = node.after;
        (node.after == NONE ? last_ : nodes_[node.after].before) = node.before;
    }
    void append(uint32_t i) {
        nodes_[i].before = last_;
        nodes_[i].after = NONE;
        (last_ == NONE ? first_ : nodes_[last_].after) = i;
        last_ = i;
    }
    void prepend(uint32_t i) {
        nodes_[i].after = first_;
        nodes_[i].before = NONE;
        (first_ == NONE ? last_ : nodes_[first_].before) = i;
        first_ = i;
    }

    Pool<Node> nodes_;
    Buckets buckets_;
    uint32_t first_ = NONE, last_ = NONE;
    size_t count_ = 0;
    uint64_t changes_ = 0;  // of the order; a new value under a key is none
};

using KeyMap = Map<true>;
using KeyIndex = Map<false>;

enum class Give { KEYS, VALUES, ITEMS };

struct Iteration {
    nb::object owner;
    KeyMap *map;
    Give give;
    bool reversed;
    uint64_t changes;
    uint32_t at = NONE;
    bool over = false;

    nb::object next() {
        at = over ? NONE : map->step(at, reversed, changes);
        over = at == NONE;
        if (over) throw nb::stop_iteration();
        const KeyMap::Node &node = map->at_index(at);
        if (give == Give::KEYS) return bytes_of(node.key());
        nb::object value = nb::borrow(node.value());
        return give == Give::VALUES ? value : nb::object(nb::make_tuple(bytes_of(node.key()), value));
    }
};

template <Give give, bool reversed = false> Iteration iterate(nb::handle_t<KeyMap> self) {
    KeyMap *map = nb::inst_ptr<KeyMap>(self);
    return {nb::borrow(self), map, give, reversed, map->changes()};
}

template <typename M> int traverse(PyObject *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(self));
    return nb::inst_ready(self) ? nb::inst_ptr<M>(self)->traverse(visit, arg) : 0;
}

template <typename M> int clear(PyObject *self) {
    if (nb::inst_ready(self)) nb::inst_ptr<M>(self)->clear();
    return 0;
}

template <typename M> nb::class_<M> bind_map(nb::module_ &m, const char *name, const char *doc) {
    static PyType_Slot slots[] = {
        {Py_tp_traverse, (void *) &traverse<M>}, {Py_tp_clear, (void *) &clear<M>}, {0, nullptr}};
    return nb::class_<M>(m, name, nb::type_slots(slots), doc)
        .def(nb::init<>())
        .def("__len__", &M::size)
        .def("__contains__", &M::contains, nb::arg("key").none())
        .def("__getitem__", &M::at, nb::arg("key").none())
        .def("__setitem__", &M::set, nb::arg("key").none(), nb::arg("value").none())
        .def("__delitem__", [](M &self, nb::handle key) { self.pop(key); }, nb::arg("key").none())
        .def("get", &M::get, nb::arg("key").none(), nb::arg("default").none() = nb::none())
        .def("pop", &M::pop, nb::arg("key").none())
        .def("pop", &M::pop_or, nb::arg("key").none(), nb::arg("default").none())
        .def("clear", &M::clear)
        .def_prop_ro("nbytes", &M::nbytes, "Bytes of its tables; the values are not counted.");
}

}  // namespace

void bind_key_map(nb::module_ &m) {
    nb::class_<Iteration>(m, "KeyMapIterator")
        .def("__iter__", [](nb::handle_t<Iteration> self) { return nb::borrow(self); })
        .def("__next__", &Iteration::next);
    bind_map<KeyIndex>(m, "KeyIndex", "A `dict` of 16-byte keys, compact, that cannot be iterated.");
    bind_map<KeyMap>(m, "KeyMap", "An `OrderedDict` of 16-byte keys, compact. It must not change in an iteration.")
        .def("popitem", &KeyMap::pop_item, nb::arg("last") = true)
        .def("move_to_end", &KeyMap::move_to_end, nb::arg("key").none(), nb::arg("last") = true)
        .def("__iter__", &iterate<Give::KEYS>)
        .def("__reversed__", &iterate<Give::KEYS, true>)
        .def("keys", &iterate<Give::KEYS>)
        .def("values", &iterate<Give::VALUES>)
        .def("items", &iterate<Give::ITEMS>);
}

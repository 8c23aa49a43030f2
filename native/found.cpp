// What Python asks of findings and of the messages that bring them. The twins that tests compare these with are in
// p2pcache/core/found.py and p2pcache/core/wire.py.

#include "directory_py.h"
#include "directory_wire.h"

namespace nb = nanobind;
using namespace p2pcache;

namespace {

std::string_view view(const nb::bytes &b) { return {b.c_str(), b.size()}; }

const char *defect(nb::bytes counts, nb::bytes bodies, nb::bytes holders, size_t members, size_t codecs,
                   size_t holders_max) {
    return found_defect(view(counts), view(bodies), view(holders), members, codecs, holders_max);
}

Sender sender_of(const std::string &name, int64_t incarnation, const nb::bytes &view_id) {
    return {name, incarnation, std::string(view(view_id))};
}

nb::tuple as_tuple(const Envelope &e) {
    return nb::make_tuple(std::string(1, e.kind), e.id, e.op, e.to, e.sender.name, e.sender.incarnation,
                          as_bytes(e.sender.view_id));
}

}  // namespace

void bind_found(nb::module_ &m) {
    m.def("found_defect", &defect, nb::arg("counts"), nb::arg("bodies"), nb::arg("holders"), nb::arg("members"),
          nb::arg("codecs"), nb::arg("holders_max"),
          "The first defect of a table's records, in words; empty where there is none.");
    m.def(
        "write_lookup",
        [](int64_t id, int64_t to, const std::string &name, int64_t incarnation, nb::bytes view_id,
           nb::bytes contents) {
            return as_bytes(write_request(id, to, sender_of(name, incarnation, view_id), view(contents)));
        },
        nb::arg("id"), nb::arg("to"), nb::arg("name"), nb::arg("incarnation"), nb::arg("view_id"),
        nb::arg("contents"), "A request of keys, joined, as `wire.encode` makes it.");
    m.def(
        "read_lookup",
        [](nb::bytes raw) {
            const Request got = read_request(view(raw));
            return nb::make_tuple(as_tuple(got.envelope), as_bytes(got.contents));
        },
        nb::arg("raw"), "(envelope, contents) of a request. Raises RuntimeError.");
    m.def(
        "read_findings",
        [](nb::bytes raw) {
            const Reply got = read_reply(view(raw));
            nb::object body = nb::none();
            if (got.error)
                body = nb::make_tuple(got.error->first, got.error->second);
            else
                body = nb::make_tuple(as_tuple(got.found), got.unknown);
            return nb::make_tuple(as_tuple(got.envelope), body);
        },
        nb::arg("raw"), "(envelope, (table, unknown) or (code, text)) of a reply. Raises RuntimeError.");
    m.def(
        "peek_id", [](nb::bytes raw) { return peek_id(view(raw)); }, nb::arg("raw"),
        "The id of a message that was refused; 0 where it has none.");
}

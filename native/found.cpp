// Checks the records of a table of findings, which may be a stranger's. The Python twin that tests compare
// this with is in p2pcache/core/found.py.

#include <vector>

#include <nanobind/nanobind.h>

#include "found.h"

namespace nb = nanobind;
using namespace p2pcache;

namespace {

const char *found_defect(nb::bytes counts, nb::bytes bodies, nb::bytes holders, size_t members, size_t codecs,
                         size_t holders_max) {
    const auto *count = static_cast<const uint8_t *>(counts.data());
    const auto *body = static_cast<const FoundBody *>(bodies.data());
    const auto *holder = static_cast<const FoundHolder *>(holders.data());
    size_t total = 0;
    bool over = false;
    for (size_t i = 0; i < counts.size(); ++i) {
        total += count[i];
        over |= count[i] > FOUND_BODIES_MAX;
    }
    if (bodies.size() != total * sizeof(FoundBody) || holders.size() % sizeof(FoundHolder))
        return "the records are not as many as the counts say";
    if (over) return "too many bodies under a key";
    size_t left = holders.size() / sizeof(FoundHolder);
    std::vector<size_t> named(members);  // by which body each member was named last; the first body is 1
    for (size_t serial = 1; serial <= total; ++serial, ++body) {
        const auto nbytes = static_cast<int64_t>(body->nbytes);
        if (!carries(body->tokens, body->base_position, nbytes, body->provenance) || body->codec >= codecs)
            return "a body's field is out of range";
        if (body->holders == 0 || body->holders > holders_max || body->holders > left)
            return "a body has too few or too many holders";
        left -= body->holders;
        for (size_t h = 0; h < body->holders; ++h, ++holder) {
            if (holder->member >= members || holder->tier > TIER_MAX)
                return "a holder's field is out of range";
            if (named[holder->member] == serial) return "a body names a holder twice";
            named[holder->member] = serial;
        }
    }
    return left == 0 ? "" : "the records are not as many as the counts say";
}

}  // namespace

void bind_found(nb::module_ &m) {
    m.def("found_defect", &found_defect, nb::arg("counts"), nb::arg("bodies"), nb::arg("holders"),
          nb::arg("members"), nb::arg("codecs"), nb::arg("holders_max"),
          "The first defect of a table's records, in words; empty where there is none.");
}

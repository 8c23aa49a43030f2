// Sorts a prompt's keys by the owner that is asked for them. The Python twin is `Ring.split` of p2pcache/core/ring.py.

#include <cstring>
#include <string>
#include <vector>

#include <nanobind/nanobind.h>

#include "buffer.h"

namespace nb = nanobind;

namespace {

constexpr size_t KEY_BYTES = 16;

nb::list split_by_owner(nb::bytes keys, nb::handle owner_rows, size_t owners_a_slot, size_t members, size_t rank) {
    const Buffer owners(owner_rows, false);
    const auto *raw = static_cast<const uint8_t *>(keys.data());
    const size_t count = keys.size() / KEY_BYTES;
    if (keys.size() % KEY_BYTES || rank >= owners_a_slot || owners.nbytes != owners_a_slot * 4 << 14)
        throw nb::value_error("not keys, or not the owners of 16,384 slots");
    std::vector<std::vector<int64_t>> places(members);
    for (size_t i = 0; i < count; ++i) {
        const uint8_t *key = raw + i * KEY_BYTES;
        const size_t slot = static_cast<size_t>(key[0] << 8 | key[1]) >> 2;
        int32_t owner;
        std::memcpy(&owner, owners.data + 4 * (slot * owners_a_slot + (key[2] % owners_a_slot + rank) % owners_a_slot), 4);
        if (owner < 0 || static_cast<size_t>(owner) >= members) throw nb::value_error("an owner is no member");
        places[static_cast<size_t>(owner)].push_back(static_cast<int64_t>(i));
    }
    nb::list out;
    std::string joined;
    for (size_t owner = 0; owner < members; ++owner) {
        const std::vector<int64_t> &mine = places[owner];
        if (mine.empty()) continue;
        joined.clear();
        for (const int64_t i : mine) joined.append(reinterpret_cast<const char *>(raw) + i * KEY_BYTES, KEY_BYTES);
        out.append(nb::make_tuple(owner, nb::bytes(mine.data(), 8 * mine.size()), nb::bytes(joined.data(), joined.size())));
    }
    return out;
}

}  // namespace

void bind_ring(nb::module_ &m) {
    m.def("split_by_owner", &split_by_owner, nb::arg("keys"), nb::arg("owners"), nb::arg("owners_a_slot"),
          nb::arg("members"), nb::arg("rank"),
          "(owner, int64 places of its keys, its keys) for each who owns any. owners: int32 [16384, owners_a_slot].");
}

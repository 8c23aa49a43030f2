// The records of a table of findings. The format is described in p2pcache/core/found.py.

#pragma once

#include <cstddef>
#include <cstdint>

namespace p2pcache {

constexpr size_t FOUND_BODIES_MAX = 8;     // under a key
constexpr size_t FOUND_HOLDERS_MAX = 1024;  // of a body
constexpr size_t FOUND_MEMBERS_MAX = 1u << 16, FOUND_CODECS_MAX = 1u << 8;
constexpr uint8_t PROVENANCE_MAX = 2, TIER_MAX = 2;

struct __attribute__((packed)) FoundBody {
    uint8_t exact[16];
    uint32_t tokens, base_position;
    uint64_t nbytes;
    uint8_t provenance, codec;
    uint16_t holders;
};
struct __attribute__((packed)) FoundHolder {
    uint16_t member;
    uint8_t tier;
};
static_assert(sizeof(FoundBody) == 36 && sizeof(FoundHolder) == 3, "the wire's records");
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "records are copied as they lie in memory");

// Whether the wire can carry these numbers of a body.
inline bool carries(int64_t tokens, int64_t base_position, int64_t nbytes, uint8_t provenance) {
    return !((tokens | base_position) >> 31) && nbytes >= 0 && provenance <= PROVENANCE_MAX;
}

}  // namespace p2pcache

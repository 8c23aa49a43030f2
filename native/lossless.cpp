// Lossless coding of bfloat16 KV: 12 bits a value instead of 16. The format and the Python twin are in
// p2pcache/codecs/lossless.py.
//
// Exponents of one layer's K, or V, keep to a few neighbouring values, so each is a 4-bit offset from a base,
// and the rare other one is written out. Nothing depends on what came before, so blocks of 64 values are
// decoded with a handful of vector instructions, about as fast as memory can be written.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "simd.h"

namespace nb = nanobind;

namespace {

constexpr size_t BLOCK = 64;           // values
constexpr size_t CODES = BLOCK / 2;    // bytes of codes a block
constexpr unsigned ESCAPE = 15;        // the code that says: the exponent is written out
constexpr size_t LAYER_HEAD = 12;      // mode, base of K, base of V, zero, escapes of K, escapes of V
enum Mode : uint8_t { RAW = 0, CODED = 1 };

struct Stream {
    size_t values;
    size_t codes() const { return (values + BLOCK - 1) / BLOCK * CODES; }
    size_t planes() const { return codes() + values; }
};

// Rotated left by one, a bfloat16 is its exponent, then a byte of mantissa and sign.
P2PC_INLINE uint16_t rotl(uint16_t x) { return static_cast<uint16_t>(x << 1 | x >> 15); }
P2PC_INLINE uint16_t rotr(uint16_t x) { return static_cast<uint16_t>(x >> 1 | x << 15); }

// Whether one of 64 codes has all its four bits set.
P2PC_INLINE bool any_escape(const uint8_t *codes) {
    uint64_t found = 0;
    for (size_t i = 0; i < CODES; i += 8) {
        uint64_t x;
        std::memcpy(&x, codes + i, sizeof x);
        found |= x & x >> 1 & x >> 2 & x >> 3;
    }
    return found & 0x1111111111111111u;
}

// 64 codes and low bytes -> 64 values; whether there is an escape among them.
P2PC_INLINE bool decode_block(const uint8_t *__restrict codes, const uint8_t *__restrict low, uint8_t base,
                              Word *__restrict out) {
    for (size_t i = 0; i < CODES; ++i) {
        const uint8_t first = base + (codes[i] & 15), second = base + (codes[i] >> 4);
        out[i] = rotr(static_cast<uint16_t>(first << 8 | low[i]));
        out[CODES + i] = rotr(static_cast<uint16_t>(second << 8 | low[CODES + i]));
    }
    return any_escape(codes);
}

P2PC_INLINE unsigned code_at(const uint8_t *codes, size_t i) {
    return i < CODES ? codes[i] & 15 : codes[i - CODES] >> 4;
}

// Puts in the exponents that were written out. False where there are fewer than the codes say.
inline bool put_escapes(const uint8_t *codes, size_t count, Word *out, const uint8_t *&next,
                        const uint8_t *end) {
    for (size_t i = 0; i < count; ++i) {
        if (code_at(codes, i) != ESCAPE) continue;
        if (next == end) return false;
        out[i] = rotr(static_cast<uint16_t>(*next++ << 8 | (rotl(out[i]) & 0xFF)));
    }
    return true;
}

struct Decode {
    // `in` holds the stream's planes and then `escapes` bytes. False where it contradicts itself.
    static P2PC_INLINE bool go(const uint8_t *in, Stream stream, uint8_t base, size_t escapes, Word *out) {
        const uint8_t *codes = in, *low = in + stream.codes(), *next = in + stream.planes();
        const uint8_t *const end = next + escapes;
        const size_t whole = stream.values / BLOCK;
        for (size_t b = 0; b < whole; ++b, codes += CODES, low += BLOCK, out += BLOCK)
            if (decode_block(codes, low, base, out) && !put_escapes(codes, BLOCK, out, next, end))
                return false;
        if (const size_t rest = stream.values % BLOCK) {
            uint8_t last_low[BLOCK] = {};
            Word last[BLOCK];
            std::memcpy(last_low, low, rest);
            if (decode_block(codes, last_low, base, last) && !put_escapes(codes, rest, last, next, end))
                return false;
            std::memcpy(out, last, rest * sizeof *last);
        }
        return next == end;
    }
};

// 64 values -> codes and low bytes; whether there is an escape among them.
P2PC_INLINE bool encode_block(const Word *__restrict in, uint8_t base, uint8_t *__restrict codes,
                              uint8_t *__restrict low) {
    uint8_t code[BLOCK];
    for (size_t i = 0; i < BLOCK; ++i) {
        const uint16_t x = rotl(in[i]);
        low[i] = static_cast<uint8_t>(x);
        const uint8_t offset = static_cast<uint8_t>((x >> 8) - base);
        code[i] = offset < ESCAPE ? offset : ESCAPE;
    }
    for (size_t i = 0; i < CODES; ++i) codes[i] = static_cast<uint8_t>(code[i] | code[CODES + i] << 4);
    return any_escape(codes);
}

struct Encode {
    // Writes planes and escapes; `room` bytes are there for escapes. Returns their count, or -1: no room.
    static P2PC_INLINE int64_t go(const Word *in, Stream stream, uint8_t base, uint8_t *out, size_t room) {
        uint8_t *codes = out, *low = out + stream.codes();
        uint8_t *const first = out + stream.planes(), *const end = first + room, *next = first;
        for (size_t at = 0; at < stream.values; at += BLOCK, codes += CODES, low += BLOCK) {
            const size_t count = std::min(BLOCK, stream.values - at);
            bool escaped;
            if (count == BLOCK) {
                escaped = encode_block(in + at, base, codes, low);
            } else {
                Word last[BLOCK];
                uint8_t last_low[BLOCK];
                // Padded with values that are none of the escapes; decoders pass over them.
                std::fill_n(last, BLOCK, rotr(static_cast<uint16_t>(base << 8)));
                std::memcpy(last, in + at, count * sizeof *last);
                escaped = encode_block(last, base, codes, last_low);
                std::memcpy(low, last_low, count);
            }
            if (!escaped) continue;
            for (size_t i = 0; i < count; ++i) {
                if (code_at(codes, i) != ESCAPE) continue;
                if (next == end) return -1;
                *next++ = static_cast<uint8_t>(rotl(in[at + i]) >> 8);
            }
        }
        return next - first;
    }
};

// The base whose 15 exponents from there on are met most often; the lowest of equals. Looks at one block in
// eight, scattered, so that it sees all heads and channels whatever their number.
uint8_t best_base(const Word *in, size_t values) {
    uint32_t count[4][256] = {};  // neighbours are often equal: four tables do not wait for each other
    for (size_t at = 0; at < values; at += BLOCK) {
        if (static_cast<uint32_t>(at / BLOCK) * 2654435761u >> 29) continue;
        for (size_t i = at; i < std::min(at + BLOCK, values); ++i)
            ++count[i % 4][static_cast<uint8_t>(in[i] >> 7)];
    }
    uint32_t window = 0, best = 0;
    size_t base = 0;
    const auto met = [&](size_t e) { return count[0][e] + count[1][e] + count[2][e] + count[3][e]; };
    for (size_t e = 0; e < 256; ++e) {
        window += met(e) - (e >= ESCAPE ? met(e - ESCAPE) : 0);
        if (e + 1 >= ESCAPE && window > best) {
            best = window;
            base = e + 1 - ESCAPE;
        }
    }
    return static_cast<uint8_t>(base);
}

void put_u32(uint8_t *at, uint64_t value) {
    for (int i = 0; i < 4; ++i) at[i] = static_cast<uint8_t>(value >> (8 * i));
}
size_t get_u32(const uint8_t *at) {
    return at[0] | size_t{at[1]} << 8 | size_t{at[2]} << 16 | size_t{at[3]} << 24;
}

// One layer of `values` of K and as many of V -> at most 1 + 4 * values bytes. Returns how many.
size_t encode_layer(int level, const uint8_t *raw, size_t values, uint8_t *out) {
    const size_t raw_bytes = 4 * values, room = raw_bytes + 1;
    const Stream stream{values};
    size_t used = LAYER_HEAD;
    std::memset(out, 0, std::min(room, LAYER_HEAD));
    bool fits = values <= UINT32_MAX && LAYER_HEAD + 2 * stream.planes() < room;
    for (size_t part = 0; part < 2 && fits; ++part) {
        const auto *in = reinterpret_cast<const Word *>(raw) + part * values;
        const size_t later = part ? 0 : stream.planes();  // what V takes at the least
        const uint8_t base = best_base(in, values);
        const size_t escapes_room = room - used - stream.planes() - later;
        const int64_t escapes = ByLevel<Encode>::run(level, in, stream, base, out + used, escapes_room);
        fits = escapes >= 0;
        if (!fits) break;
        out[1 + part] = base;
        put_u32(out + 4 + 4 * part, static_cast<uint64_t>(escapes));
        used += stream.planes() + static_cast<size_t>(escapes);
    }
    out[0] = fits ? CODED : RAW;
    if (fits) return used;
    std::memcpy(out + 1, raw, raw_bytes);
    return room;
}

bool decode_layer(int level, const uint8_t *in, size_t nbytes, size_t values, uint8_t *raw) {
    if (nbytes < 1) return false;
    if (in[0] == RAW) {
        if (nbytes != 1 + 4 * values) return false;
        std::memcpy(raw, in + 1, 4 * values);
        return true;
    }
    if (in[0] != CODED || nbytes < LAYER_HEAD || in[3]) return false;
    const Stream stream{values};
    const size_t escapes[2] = {get_u32(in + 4), get_u32(in + 8)};
    if (nbytes != LAYER_HEAD + 2 * stream.planes() + escapes[0] + escapes[1]) return false;
    const uint8_t *at = in + LAYER_HEAD;
    for (size_t part = 0; part < 2; ++part) {
        auto *out = reinterpret_cast<Word *>(raw) + part * values;
        if (!ByLevel<Decode>::run(level, at, stream, in[1 + part], escapes[part], out)) return false;
        at += stream.planes() + escapes[part];
    }
    return true;
}

using Bytes = nb::ndarray<const uint8_t, nb::shape<-1>, nb::c_contig, nb::device::cpu>;
using Room = nb::ndarray<uint8_t, nb::shape<-1>, nb::c_contig, nb::device::cpu>;

std::vector<uint64_t> encode(Bytes raw, size_t layers, Room out, const std::string &level_name) {
    const int level = simd::level_of(level_name);
    size_t stride;  // bytes of one value of K and one of V in every layer
    if (!layers || __builtin_mul_overflow(layers, size_t{4}, &stride) || raw.size() % stride)
        throw std::invalid_argument("no whole number of values a layer");
    if (out.size() < raw.size() + layers) throw std::invalid_argument("too little room for the encoded body");
    const size_t layer_bytes = raw.size() / layers;
    std::vector<uint64_t> ends;
    nb::gil_scoped_release release;
    size_t used = 0;
    for (size_t layer = 0; layer < layers; ++layer) {
        used += encode_layer(level, raw.data() + layer * layer_bytes, layer_bytes / 4, out.data() + used);
        ends.push_back(used);
    }
    return ends;
}

int64_t decode(Bytes encoded, const std::vector<uint64_t> &ends, Room raw, const std::string &level_name) {
    const int level = simd::level_of(level_name);
    const size_t layers = ends.size();
    if (!layers || raw.size() % (4 * layers))
        throw std::invalid_argument("no whole number of values a layer");
    const size_t layer_bytes = raw.size() / layers;
    nb::gil_scoped_release release;
    size_t start = 0;
    for (size_t layer = 0; layer < layers; ++layer) {
        const size_t end = ends[layer];
        if (end < start || end > encoded.size() ||
            !decode_layer(level, encoded.data() + start, end - start, layer_bytes / 4,
                          raw.data() + layer * layer_bytes))
            return static_cast<int64_t>(layer);
        start = end;
    }
    return -1;
}

}  // namespace

void bind_lossless(nb::module_ &m) {
    const auto levels = [] {
        return std::vector<std::string>(simd::LEVELS, simd::LEVELS + simd::level_count());
    };
    m.def("simd_levels", levels, "Vector instruction sets that this CPU and the kernels have, the best last.");
    m.def("lossless_encode", &encode, nb::arg("raw"), nb::arg("layers"), nb::arg("out"),
          nb::arg("level") = "",
          "Encode a bfloat16 body into `out`, len(raw) + layers bytes; the end of each layer in it.");
    m.def("lossless_decode", &decode, nb::arg("encoded"), nb::arg("ends"), nb::arg("raw"),
          nb::arg("level") = "",
          "Decode layers that end at `ends` into `raw`; the first malformed one, or -1.");
}

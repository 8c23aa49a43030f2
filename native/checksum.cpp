// XXH3-64 of the layers of a body, computed while their bytes arrive. The Python twin is in
// p2pcache/core/checksum.py, on the `xxhash` package.
//
// The length of a layer is known from the start and its bytes stay where they land, so this is the one-shot
// algorithm paused and resumed: no state but eight accumulators and a position, and nothing is buffered. Layers of
// 240 bytes and less take another path in XXH3, which is left to the twin.
//
// Source: the XXH3 specification and constants, Yann Collet, xxHash 0.8 (doc/xxhash_spec.md).

#include <sys/socket.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <system_error>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "buffer.h"

namespace nb = nanobind;

namespace {

constexpr uint32_t P32_1 = 0x9E3779B1u, P32_2 = 0x85EBCA77u, P32_3 = 0xC2B2AE3Du;
constexpr uint64_t P64_1 = 0x9E3779B185EBCA87ull, P64_2 = 0xC2B2AE3D27D4EB4Full, P64_3 = 0x165667B19E3779F9ull,
                   P64_4 = 0x85EBCA77C2B2AE63ull, P64_5 = 0x27D4EB2F165667C5ull;
constexpr uint64_t LAYER_STRIDE = 0x9E3779B97F4A7C15ull;  // as in the twin

constexpr size_t STRIPE = 64, SECRET = 192, STRIPES_A_BLOCK = (SECRET - STRIPE) / 8;
constexpr size_t SHORT_MAX = 240;
constexpr size_t RECEIVE_BYTES = 256 << 10;  // of one recv: what it brings is still in the cache when it is hashed
constexpr size_t STREAM_FROM = 1 << 20;      // copies from this size on leave the cache to others

const uint8_t DEFAULT_SECRET[SECRET] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

inline uint64_t read64(const uint8_t *p) {
    uint64_t v;
    std::memcpy(&v, p, 8);
    return v;
}

inline uint64_t fold(uint64_t a, uint64_t b) {
    const unsigned __int128 product = static_cast<unsigned __int128>(a) * b;
    return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

// What a hash of one layer has come to. `secret` follows from the seed.
struct State {
    alignas(64) uint64_t acc[8];
    alignas(64) uint8_t secret[SECRET];
    size_t stripes;  // done
};

void start(State &s, uint64_t seed) {
    const uint64_t init[8] = {P32_3, P64_1, P64_2, P64_3, P64_4, P32_2, P64_5, P32_1};
    std::memcpy(s.acc, init, sizeof init);
    for (size_t i = 0; i < SECRET; i += 16) {
        const uint64_t low = read64(DEFAULT_SECRET + i) + seed, high = read64(DEFAULT_SECRET + i + 8) - seed;
        std::memcpy(s.secret + i, &low, 8);
        std::memcpy(s.secret + i + 8, &high, 8);
    }
    s.stripes = 0;
}

// `copy`, where it is not null, gets the same bytes that are hashed; stream: past the cache.
using Accumulate = void (*)(State &s, const uint8_t *data, size_t stripes, uint8_t *copy, bool stream);

void accumulate_plain(State &s, const uint8_t *data, size_t stripes, uint8_t *copy, bool) {
    for (size_t n = 0; n < stripes; ++n, data += STRIPE) {
        const size_t at = s.stripes % STRIPES_A_BLOCK;
        uint64_t value[8];
        std::memcpy(value, data, STRIPE);
        if (copy) std::memcpy(copy + n * STRIPE, value, STRIPE);
        for (size_t i = 0; i < 8; ++i) {
            const uint64_t keyed = value[i] ^ read64(s.secret + 8 * at + 8 * i);
            s.acc[i ^ 1] += value[i];
            s.acc[i] += (keyed & 0xFFFFFFFFu) * (keyed >> 32);
        }
        s.stripes += 1;
        if (at + 1 == STRIPES_A_BLOCK)
            for (size_t i = 0; i < 8; ++i) {
                const uint64_t a = s.acc[i];
                s.acc[i] = ((a ^ (a >> 47)) ^ read64(s.secret + SECRET - STRIPE + 8 * i)) * P32_1;
            }
    }
}

#if defined(__x86_64__)

__attribute__((target("avx2"))) inline __m256i scrambled(__m256i acc, __m256i key) {
    const __m256i prime = _mm256_set1_epi32(static_cast<int>(P32_1));
    const __m256i mixed = _mm256_xor_si256(_mm256_xor_si256(acc, _mm256_srli_epi64(acc, 47)), key);
    const __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(mixed, 32), prime);
    return _mm256_add_epi64(_mm256_mul_epu32(mixed, prime), _mm256_slli_epi64(high, 32));
}

__attribute__((target("avx2"))) void accumulate_avx2(State &s, const uint8_t *data, size_t stripes, uint8_t *copy,
                                                      bool stream) {
    __m256i acc0 = _mm256_load_si256(reinterpret_cast<__m256i *>(s.acc));
    __m256i acc1 = _mm256_load_si256(reinterpret_cast<__m256i *>(s.acc + 4));
    size_t at = s.stripes % STRIPES_A_BLOCK;
    stream = stream && reinterpret_cast<uintptr_t>(copy) % 32 == 0;
    for (size_t n = 0; n < stripes; ++n, data += STRIPE) {
        const uint8_t *key = s.secret + 8 * at;
        const __m256i d0 = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(data));
        const __m256i d1 = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(data + 32));
        _mm_prefetch(reinterpret_cast<const char *>(data + 512), _MM_HINT_T0);
        if (copy) {
            __m256i *to = reinterpret_cast<__m256i *>(copy + n * STRIPE);
            if (stream) {
                _mm256_stream_si256(to, d0);
                _mm256_stream_si256(to + 1, d1);
            } else {
                _mm256_storeu_si256(to, d0);
                _mm256_storeu_si256(to + 1, d1);
            }
        }
        const __m256i k0 = _mm256_xor_si256(d0, _mm256_loadu_si256(reinterpret_cast<const __m256i *>(key)));
        const __m256i k1 = _mm256_xor_si256(d1, _mm256_loadu_si256(reinterpret_cast<const __m256i *>(key + 32)));
        const __m256i p0 = _mm256_mul_epu32(k0, _mm256_srli_epi64(k0, 32));
        const __m256i p1 = _mm256_mul_epu32(k1, _mm256_srli_epi64(k1, 32));
        acc0 = _mm256_add_epi64(acc0, _mm256_add_epi64(p0, _mm256_shuffle_epi32(d0, 0x4E)));
        acc1 = _mm256_add_epi64(acc1, _mm256_add_epi64(p1, _mm256_shuffle_epi32(d1, 0x4E)));
        if (++at == STRIPES_A_BLOCK) {
            const uint8_t *last = s.secret + SECRET - STRIPE;
            acc0 = scrambled(acc0, _mm256_load_si256(reinterpret_cast<const __m256i *>(last)));
            acc1 = scrambled(acc1, _mm256_load_si256(reinterpret_cast<const __m256i *>(last + 32)));
            at = 0;
        }
    }
    if (stream) _mm_sfence();
    _mm256_store_si256(reinterpret_cast<__m256i *>(s.acc), acc0);
    _mm256_store_si256(reinterpret_cast<__m256i *>(s.acc + 4), acc1);
    s.stripes += stripes;
}

__attribute__((target("avx512f"))) void accumulate_avx512(State &s, const uint8_t *data, size_t stripes,
                                                           uint8_t *copy, bool stream) {
    __m512i acc = _mm512_load_si512(s.acc);
    const __m512i prime = _mm512_set1_epi32(static_cast<int>(P32_1));
    size_t at = s.stripes % STRIPES_A_BLOCK;
    stream = stream && reinterpret_cast<uintptr_t>(copy) % 64 == 0;
    for (size_t n = 0; n < stripes; ++n, data += STRIPE) {
        const __m512i d = _mm512_loadu_si512(data);
        _mm_prefetch(reinterpret_cast<const char *>(data + 512), _MM_HINT_T0);
        if (copy) {
            if (stream)
                _mm512_stream_si512(reinterpret_cast<__m512i *>(copy + n * STRIPE), d);
            else
                _mm512_storeu_si512(copy + n * STRIPE, d);
        }
        const __m512i k = _mm512_xor_si512(d, _mm512_loadu_si512(s.secret + 8 * at));
        const __m512i product = _mm512_mul_epu32(k, _mm512_srli_epi64(k, 32));
        acc = _mm512_add_epi64(acc, _mm512_add_epi64(product, _mm512_shuffle_epi32(d, _MM_PERM_BADC)));
        if (++at == STRIPES_A_BLOCK) {
            const __m512i key = _mm512_loadu_si512(s.secret + SECRET - STRIPE);
            const __m512i mixed = _mm512_xor_si512(_mm512_xor_si512(acc, _mm512_srli_epi64(acc, 47)), key);
            const __m512i high = _mm512_mul_epu32(_mm512_srli_epi64(mixed, 32), prime);
            acc = _mm512_add_epi64(_mm512_mul_epu32(mixed, prime), _mm512_slli_epi64(high, 32));
            at = 0;
        }
    }
    if (stream) _mm_sfence();
    _mm512_store_si512(s.acc, acc);
    s.stripes += stripes;
}

#endif

Accumulate accumulator(const std::string &level) {
#if defined(__x86_64__)
    const bool avx512 = __builtin_cpu_supports("avx512f"), avx2 = __builtin_cpu_supports("avx2");
    if ((level.empty() || level == "avx512") && avx512) return accumulate_avx512;
    if ((level.empty() || level == "avx2") && avx2) return accumulate_avx2;
#endif
    return level.empty() || level == "plain" ? accumulate_plain : nullptr;
}

Accumulate best() {
    static const Accumulate found = accumulator("");
    return found;
}

// The hash of a layer whose stripes but the last have been taken in. `end`: behind its last byte.
uint64_t finish(const State &s, const uint8_t *end, size_t nbytes) {
    uint64_t acc[8], last[8];
    std::memcpy(acc, s.acc, sizeof acc);
    std::memcpy(last, end - STRIPE, STRIPE);
    for (size_t i = 0; i < 8; ++i) {
        const uint64_t keyed = last[i] ^ read64(s.secret + SECRET - STRIPE - 7 + 8 * i);
        acc[i ^ 1] += last[i];
        acc[i] += (keyed & 0xFFFFFFFFu) * (keyed >> 32);
    }
    uint64_t hash = nbytes * P64_1;
    for (size_t i = 0; i < 8; i += 2)
        hash += fold(acc[i] ^ read64(s.secret + 11 + 8 * i), acc[i + 1] ^ read64(s.secret + 19 + 8 * i));
    hash = (hash ^ (hash >> 37)) * 0x165667919E3779F9ull;
    return hash ^ (hash >> 32);
}

uint64_t layer_seed(uint64_t key, size_t layer) { return key + layer * LAYER_STRIDE; }

// A body that arrives from its first byte to its last, and what is known to be right of it.
class LayerCheck {
public:
    LayerCheck(nb::object body, uint64_t key, std::vector<uint64_t> expected, const std::string &level)
        : body_(body, true), key_(key), expected_(std::move(expected)), accumulate_(accumulator(level)) {
        if (!accumulate_) throw std::invalid_argument("this processor has no " + level);
        const size_t layers = expected_.size();
        if (!layers) return;  // nothing is known of these bytes: they are moved and not checked
        if (body_.nbytes % layers || body_.nbytes / layers <= SHORT_MAX)
            throw std::invalid_argument("layers must be equal, and of more than 240 bytes each");
        layer_bytes_ = body_.nbytes / layers;
        start(state_, layer_seed(key_, 0));
    }

    size_t landed() const { return landed_; }
    size_t good() const { return expected_.empty() ? landed_ : good_layers_ * layer_bytes_; }
    int64_t bad_layer() const { return bad_layer_; }

    void advance(size_t upto) {
        const Turn turn(busy_);
        check_range(upto);
        nb::gil_scoped_release release;
        landed_ = upto;
        hash(nullptr);
    }

    void copy(nb::object source, size_t upto) {
        const Turn turn(busy_);
        const Buffer from(source, false);
        check_range(upto);
        if (from.nbytes != body_.nbytes) throw std::invalid_argument("the source has another length");
        nb::gil_scoped_release release;
        const size_t before = landed_;
        landed_ = upto;
        if (expected_.empty())
            copy_rest(from.data, before, upto);
        else
            hash(from.data);
    }

    // Returns whether the other side has ended before all came. Throws OSError's C++ form.
    bool receive(int fd, size_t upto) {
        const Turn turn(busy_);
        check_range(upto);
        int error = 0;
        bool ended = false;
        {
            nb::gil_scoped_release release;
            while (landed_ < upto && !ended && !error && bad_layer_ < 0) {
                const size_t piece = upto - landed_ < RECEIVE_BYTES ? upto - landed_ : RECEIVE_BYTES;
                const ssize_t got = recv(fd, body_.data + landed_, piece, MSG_WAITALL);
                if (got > 0) {
                    landed_ += static_cast<size_t>(got);
                    hash(nullptr);
                } else if (!got) {
                    ended = true;
                } else if (errno != EINTR) {
                    error = errno;
                }
            }
        }
        if (error) {
            errno = error;
            PyErr_SetFromErrno(PyExc_OSError);
            throw nb::python_error();
        }
        return ended;
    }

private:
    // The GIL is given up meanwhile, so a second thread could come.
    struct Turn {
        explicit Turn(std::atomic<bool> &busy) : busy(busy) {
            if (busy.exchange(true, std::memory_order_acquire))
                throw std::runtime_error("another thread is at this body");
        }
        ~Turn() { busy.store(false, std::memory_order_release); }
        std::atomic<bool> &busy;
    };

    void check_range(size_t upto) const {
        if (upto < landed_ || upto > body_.nbytes)
            throw std::invalid_argument("bytes land in order, and within the body");
    }

    // Take in what has landed. source: where it is to be copied from first.
    void hash(const uint8_t *source) {
        while (bad_layer_ < 0 && good_layers_ < expected_.size()) {
            const size_t begin = good_layers_ * layer_bytes_, end = begin + layer_bytes_;
            const size_t here = landed_ < end ? landed_ : end;
            const size_t inner = (layer_bytes_ - 1) / STRIPE;  // the last stripe is another one
            size_t until = (here - begin) / STRIPE;
            if (until > inner) until = inner;
            const size_t from = begin + state_.stripes * STRIPE, bytes = (until - state_.stripes) * STRIPE;
            if (bytes) {
                const bool stream = source && body_.nbytes >= STREAM_FROM;
                accumulate_(state_, (source ? source : body_.data) + from, bytes / STRIPE,
                            source ? body_.data + from : nullptr, stream);
            }
            if (landed_ < end) {
                if (source) copy_rest(source, from + bytes, here);
                return;
            }
            if (source) copy_rest(source, from + bytes, end);
            if (finish(state_, body_.data + end, layer_bytes_) != expected_[good_layers_]) {
                bad_layer_ = static_cast<int64_t>(good_layers_);
                return;
            }
            start(state_, layer_seed(key_, ++good_layers_));
        }
    }

    void copy_rest(const uint8_t *source, size_t from, size_t to) {
        if (to > from) std::memcpy(body_.data + from, source + from, to - from);
    }

    Buffer body_;
    uint64_t key_;
    std::vector<uint64_t> expected_;
    Accumulate accumulate_;
    size_t layer_bytes_ = 0, landed_ = 0, good_layers_ = 0;
    int64_t bad_layer_ = -1;
    State state_;
    std::atomic<bool> busy_{false};
};

std::vector<uint64_t> layer_checksums(nb::object body, uint64_t key, size_t layers, const std::string &level) {
    const Buffer from(body, false);
    const Accumulate accumulate = level.empty() ? best() : accumulator(level);
    if (!accumulate) throw std::invalid_argument("this processor has no " + level);
    if (!layers || from.nbytes % layers || from.nbytes / layers <= SHORT_MAX)
        throw std::invalid_argument("layers must be equal, and of more than 240 bytes each");
    const size_t layer_bytes = from.nbytes / layers;
    std::vector<uint64_t> out(layers);
    nb::gil_scoped_release release;
    for (size_t layer = 0; layer < layers; ++layer) {
        State state;
        start(state, layer_seed(key, layer));
        const uint8_t *data = from.data + layer * layer_bytes;
        accumulate(state, data, (layer_bytes - 1) / STRIPE, nullptr, false);
        out[layer] = finish(state, data + layer_bytes, layer_bytes);
    }
    return out;
}

}  // namespace

void bind_checksum(nb::module_ &m) {
    nb::class_<LayerCheck>(m, "LayerCheck", "See p2pcache.core.checksum.LayerCheck, the twin. One thread at a time: RuntimeError.")
        .def(nb::init<nb::object, uint64_t, std::vector<uint64_t>, const std::string &>(), nb::arg("body"),
             nb::arg("key"), nb::arg("checksums"), nb::arg("level") = "")
        .def_prop_ro("landed_bytes", &LayerCheck::landed)
        .def_prop_ro("good_bytes", &LayerCheck::good)
        .def_prop_ro("bad_layer", [](const LayerCheck &c) -> nb::object {
            return c.bad_layer() < 0 ? nb::none() : nb::object(nb::int_(c.bad_layer()));
        })
        .def("advance", &LayerCheck::advance, nb::arg("landed_bytes"))
        .def("copy", &LayerCheck::copy, nb::arg("source"), nb::arg("landed_bytes"))
        .def("receive", &LayerCheck::receive, nb::arg("fd"), nb::arg("landed_bytes"));
    m.def("layer_checksums", &layer_checksums, nb::arg("body"), nb::arg("key"), nb::arg("layers"),
          nb::arg("level") = "", "XXH3-64 of each layer, seeded as p2pcache.core.checksum says.");
    m.def("checksum_levels", [] {
        std::vector<std::string> levels;
        for (const char *level : {"plain", "avx2", "avx512"})
            if (accumulator(level)) levels.push_back(level);
        return levels;
    });
}

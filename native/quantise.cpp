// Quantised KV: 8 or 4 bits a value, K by channel and V by token. The format, the rounding and the Python
// twin are in p2pcache/codecs/quantised.py.
//
// A group of values has a lowest value and a step, both bfloat16, and q stands for low + q * step. A product
// of 8 and 8 bits is exact in single precision, so a value is rounded once, and once more into its own
// format.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include "simd.h"

namespace nb = nanobind;

namespace {

constexpr size_t EXACT_TOKENS = 4;   // at the start of a body, as they were
constexpr size_t GROUP_TOKENS = 64;  // of K; the last group takes what is left, fewer than twice as many

struct Shape {
    size_t tokens, kv_heads, head_dim;
    size_t channels() const { return kv_heads * head_dim; }
    size_t exact() const { return std::min(tokens, EXACT_TOKENS); }
    size_t coded() const { return tokens - exact(); }
    size_t groups() const { return coded() ? std::max<size_t>(1, coded() / GROUP_TOKENS) : 0; }
    size_t group_tokens(size_t group) const {
        return group + 1 < groups() ? GROUP_TOKENS : coded() - group * GROUP_TOKENS;
    }
};

template <int BITS>
struct Packed {
    static constexpr float LEVELS = (1 << BITS) - 1;
    static size_t row(size_t values) { return BITS == 8 ? values : (values + 1) / 2; }
    static size_t layer(const Shape &s, size_t value_bytes) {
        const size_t k = s.groups() * s.channels() * 4 + s.coded() * row(s.channels());
        const size_t v = s.coded() * s.kv_heads * (4 + row(s.head_dim));
        return 2 * s.exact() * s.channels() * value_bytes + k + v;
    }
    // A row of q, a byte each, to its packed form: values of the second half are the high nibbles.
    static P2PC_INLINE void pack(const uint8_t *__restrict q, size_t n, uint8_t *__restrict out) {
        if (BITS == 8) {
            std::memcpy(out, q, n);
            return;
        }
        const size_t half = (n + 1) / 2;
        for (size_t i = 0; i < n - half; ++i) out[i] = static_cast<uint8_t>(q[i] | q[half + i] << 4);
        if (n % 2) out[half - 1] = q[half - 1];
    }
    static P2PC_INLINE void unpack(const uint8_t *__restrict in, size_t n, uint8_t *__restrict q) {
        if (BITS == 8) {
            std::memcpy(q, in, n);
            return;
        }
        const size_t half = (n + 1) / 2;
        for (size_t i = 0; i < half; ++i) q[i] = in[i] & 15;
        for (size_t i = 0; i < n - half; ++i) q[half + i] = in[i] >> 4;
    }
};

// The largest bfloat16 not above f, and the smallest not below f >= 0; both give +0 for -0.
P2PC_INLINE uint16_t floor_bf16(float f) {
    const uint32_t u = bit_cast<uint32_t>(f + 0.0f);
    return static_cast<uint16_t>((u >> 16) + ((u >> 31) && (u & 0xFFFF)));
}
P2PC_INLINE uint16_t ceil_bf16(float f) {
    const uint32_t u = bit_cast<uint32_t>(f + 0.0f);
    return static_cast<uint16_t>((u >> 16) + ((u & 0xFFFF) != 0));
}

// (x - low) / step to the nearest integer, ties to even, from 0 to levels.
P2PC_INLINE uint8_t quantum(float x, float low, float step, float levels) {
    float q = (x - low) / step;
    q = q < levels ? q : levels;  // a step of 0 gives NaN, which is levels, which decodes to low all the same
    constexpr float MAGIC = 0x1.8p23f;  // above it a float has no fraction: the addition rounds
    q = (q + MAGIC) - MAGIC;
    return static_cast<uint8_t>(static_cast<int32_t>(q));
}

P2PC_INLINE bool finite(float f) { return (bit_cast<uint32_t>(f) & 0x7FFFFFFF) < 0x7F800000; }

// Floats in an order of integers, so that the compiler vectorises the search for the least and the greatest.
P2PC_INLINE int32_t ordered(float f) {
    const int32_t i = bit_cast<int32_t>(f);
    return i ^ ((i >> 31) & 0x7FFFFFFF);
}
P2PC_INLINE float unordered(int32_t i) { return bit_cast<float>(i ^ ((i >> 31) & 0x7FFFFFFF)); }

// low and step of values between `least` and `greatest`, and both as floats.
struct Grid {
    uint16_t low, step;
    P2PC_INLINE Grid(float least, float greatest, float levels)
        : low(floor_bf16(least)), step(ceil_bf16((greatest - BF16::load(low)) / levels)) {}
    P2PC_INLINE bool usable() const { return finite(BF16::load(low)) && finite(BF16::load(step)); }
};

// What an encoder needs beside its input: rows of one value a channel.
struct Scratch {
    std::vector<float> x, low, step;
    std::vector<int32_t> least, greatest;
    std::vector<uint8_t> q;
    std::vector<double> error2, power2;  // sums of squares over the tokens of a layer's K or V
    explicit Scratch(size_t n)
        : x(n), low(n), step(n), least(n), greatest(n), q(n), error2(n), power2(n) {}
};

template <class F>
P2PC_INLINE void load_row(const typename F::Bits *__restrict in, size_t n, float *__restrict out) {
    for (size_t i = 0; i < n; ++i) out[i] = F::load(in[i]);
}

// Quantises a row of n values and adds what that costs. low and step: one a value.
template <class F, int BITS>
P2PC_INLINE void encode_row(const float *__restrict x, const float *__restrict low,
                            const float *__restrict step, size_t n, uint8_t *__restrict q,
                            double *__restrict error2) {
    for (size_t i = 0; i < n; ++i) q[i] = quantum(x[i], low[i], step[i], Packed<BITS>::LEVELS);
    for (size_t i = 0; i < n; ++i) {
        const float y = F::load(F::store(low[i] + static_cast<float>(q[i]) * step[i]));
        const double off = static_cast<double>(y) - x[i];
        error2[i] += off * off;
    }
}

P2PC_INLINE void add_power(const float *__restrict x, size_t n, double *__restrict power2) {
    for (size_t i = 0; i < n; ++i) power2[i] += static_cast<double>(x[i]) * x[i];
}

// One layer. False where it holds a value that is not finite, or a range that no bfloat16 step can span.
template <class F, int BITS>
struct EncodeK {
    static P2PC_INLINE bool go(const typename F::Bits *in, Shape s, Scratch *w, uint8_t *out) {
        const size_t n = s.channels();
        for (size_t group = 0; group < s.groups(); ++group) {
            const size_t tokens = s.group_tokens(group);
            std::fill_n(w->least.data(), n, std::numeric_limits<int32_t>::max());
            std::fill_n(w->greatest.data(), n, std::numeric_limits<int32_t>::min());
            for (size_t t = 0; t < tokens; ++t) {
                load_row<F>(in + t * n, n, w->x.data());
                int32_t *__restrict least = w->least.data(), *__restrict greatest = w->greatest.data();
                const float *__restrict x = w->x.data();
                for (size_t c = 0; c < n; ++c) {
                    const int32_t i = ordered(x[c]);
                    least[c] = i < least[c] ? i : least[c];
                    greatest[c] = i > greatest[c] ? i : greatest[c];
                }
            }
            bool usable = true;
            for (size_t c = 0; c < n; ++c) {
                const float least = unordered(w->least[c]), greatest = unordered(w->greatest[c]);
                const Grid grid(least, greatest, Packed<BITS>::LEVELS);
                usable &= finite(least) && finite(greatest) && grid.usable();
                w->low[c] = BF16::load(grid.low);
                w->step[c] = BF16::load(grid.step);
                std::memcpy(out + 2 * c, &grid.low, 2);
                std::memcpy(out + 2 * (n + c), &grid.step, 2);
            }
            if (!usable) return false;
            out += 4 * n;
            for (size_t t = 0; t < tokens; ++t, in += n, out += Packed<BITS>::row(n)) {
                load_row<F>(in, n, w->x.data());
                encode_row<F, BITS>(w->x.data(), w->low.data(), w->step.data(), n, w->q.data(),
                                    w->error2.data());
                add_power(w->x.data(), n, w->power2.data());
                Packed<BITS>::pack(w->q.data(), n, out);
            }
        }
        return true;
    }
};

template <class F, int BITS>
struct EncodeV {
    static P2PC_INLINE bool go(const typename F::Bits *in, Shape s, Scratch *w, uint8_t *out) {
        const size_t n = s.head_dim, rows = s.coded() * s.kv_heads, packed = Packed<BITS>::row(n);
        uint8_t *at = out + 4 * rows;
        for (size_t row = 0; row < rows; ++row, in += n, at += packed) {
            load_row<F>(in, n, w->x.data());
            const float *__restrict x = w->x.data();
            int32_t least_i = std::numeric_limits<int32_t>::max();
            int32_t greatest_i = std::numeric_limits<int32_t>::min();
            for (size_t d = 0; d < n; ++d) {
                const int32_t i = ordered(x[d]);
                least_i = i < least_i ? i : least_i;
                greatest_i = i > greatest_i ? i : greatest_i;
            }
            const float least = unordered(least_i), greatest = unordered(greatest_i);
            const Grid grid(least, greatest, Packed<BITS>::LEVELS);
            if (!finite(least) || !finite(greatest) || !grid.usable()) return false;
            std::memcpy(out + 2 * row, &grid.low, 2);
            std::memcpy(out + 2 * (rows + row), &grid.step, 2);
            std::fill_n(w->low.data(), n, BF16::load(grid.low));
            std::fill_n(w->step.data(), n, BF16::load(grid.step));
            const size_t head = row % s.kv_heads * n;
            encode_row<F, BITS>(x, w->low.data(), w->step.data(), n, w->q.data(), w->error2.data() + head);
            add_power(x, n, w->power2.data() + head);
            Packed<BITS>::pack(w->q.data(), n, at);
        }
        return true;
    }
};

template <class F>
P2PC_INLINE void decode_row(const uint8_t *__restrict q, const float *__restrict low,
                            const float *__restrict step, size_t n, typename F::Bits *__restrict out) {
    for (size_t i = 0; i < n; ++i) out[i] = F::store(low[i] + static_cast<float>(q[i]) * step[i]);
}

// `count` bfloat16 numbers as floats. False where one of them is not finite.
P2PC_INLINE bool load_grid(const uint8_t *in, size_t count, float *__restrict out) {
    bool good = true;
    for (size_t i = 0; i < count; ++i) {
        uint16_t bits;
        std::memcpy(&bits, in + 2 * i, 2);
        out[i] = BF16::load(bits);
        good &= finite(out[i]);
    }
    return good;
}

template <class F, int BITS>
struct DecodeK {
    static P2PC_INLINE bool go(const uint8_t *in, Shape s, Scratch *w, typename F::Bits *out) {
        const size_t n = s.channels();
        for (size_t group = 0; group < s.groups(); ++group) {
            if (!load_grid(in, n, w->low.data()) || !load_grid(in + 2 * n, n, w->step.data())) return false;
            in += 4 * n;
            for (size_t t = 0; t < s.group_tokens(group); ++t, in += Packed<BITS>::row(n), out += n) {
                const uint8_t *q = in;
                if (BITS != 8) {
                    Packed<BITS>::unpack(in, n, w->q.data());
                    q = w->q.data();
                }
                decode_row<F>(q, w->low.data(), w->step.data(), n, out);
            }
        }
        return true;
    }
};

template <class F, int BITS>
struct DecodeV {
    static P2PC_INLINE bool go(const uint8_t *in, Shape s, Scratch *w, typename F::Bits *out) {
        const size_t n = s.head_dim, rows = s.coded() * s.kv_heads, packed = Packed<BITS>::row(n);
        const uint8_t *at = in + 4 * rows;
        for (size_t row = 0; row < rows; ++row, at += packed, out += n) {
            float low, step;
            if (!load_grid(in + 2 * row, 1, &low) || !load_grid(in + 2 * (rows + row), 1, &step))
                return false;
            const uint8_t *__restrict q = at;
            if (BITS != 8) {
                Packed<BITS>::unpack(at, n, w->q.data());
                q = w->q.data();
            }
            typename F::Bits *__restrict to = out;
            for (size_t d = 0; d < n; ++d) to[d] = F::store(low + static_cast<float>(q[d]) * step);
        }
        return true;
    }
};

// The worst channel's error: root of the mean square of what decoding changes, over that of the channel; a
// channel that is all but silent beside its head counts as a sixteenth of it.
double worst_channel(const Shape &s, const Scratch &w) {
    double worst2 = 0;
    for (size_t first = 0; first < s.channels(); first += s.head_dim) {
        double head2 = 0;
        for (size_t c = first; c < first + s.head_dim; ++c) head2 += w.power2[c];
        const double least2 = head2 / static_cast<double>(s.head_dim) / 256;
        for (size_t c = first; c < first + s.head_dim; ++c)
            if (w.error2[c] > 0) worst2 = std::max(worst2, w.error2[c] / std::max(w.power2[c], least2));
    }
    return std::sqrt(worst2);
}

template <class F, int BITS>
struct Coder {
    using Bits = typename F::Bits;

    // Adds the layer's error to `worst`. False where the layer cannot be coded.
    static bool encode_layer(int level, const uint8_t *raw, const Shape &s, Scratch &w, uint8_t *out,
                             double &worst) {
        const size_t exact = s.exact() * s.channels(), part = s.tokens * s.channels();
        const size_t k_bytes = s.groups() * s.channels() * 4 + s.coded() * Packed<BITS>::row(s.channels());
        std::memcpy(out, raw, exact * sizeof(Bits));
        std::memcpy(out + exact * sizeof(Bits), raw + part * sizeof(Bits), exact * sizeof(Bits));
        out += 2 * exact * sizeof(Bits);
        for (size_t kv = 0; kv < 2; ++kv) {
            const auto *in = reinterpret_cast<const Bits *>(raw) + kv * part;
            std::fill(w.error2.begin(), w.error2.end(), 0.0);
            std::fill(w.power2.begin(), w.power2.end(), 0.0);
            for (size_t t = 0; t < s.exact(); ++t) {
                for (size_t c = 0; c < s.channels(); ++c) w.x[c] = F::load(in[t * s.channels() + c]);
                if (!std::all_of(w.x.begin(), w.x.end(), [](float f) { return finite(f); })) return false;
                add_power(w.x.data(), s.channels(), w.power2.data());
            }
            in += exact;
            if (kv == 0 ? !ByLevel<EncodeK<F, BITS>>::run(level, in, s, &w, out)
                        : !ByLevel<EncodeV<F, BITS>>::run(level, in, s, &w, out + k_bytes))
                return false;
            const double error = worst_channel(s, w);
            if (!std::isfinite(error)) return false;  // a decoded value is too large for the format
            worst = std::max(worst, error);
        }
        return true;
    }

    static bool decode_layer(int level, const uint8_t *in, const Shape &s, Scratch &w, uint8_t *raw) {
        const size_t exact = s.exact() * s.channels(), part = s.tokens * s.channels();
        const size_t k_bytes = s.groups() * s.channels() * 4 + s.coded() * Packed<BITS>::row(s.channels());
        std::memcpy(raw, in, exact * sizeof(Bits));
        std::memcpy(raw + part * sizeof(Bits), in + exact * sizeof(Bits), exact * sizeof(Bits));
        in += 2 * exact * sizeof(Bits);
        auto *out = reinterpret_cast<Bits *>(raw) + exact;
        return ByLevel<DecodeK<F, BITS>>::run(level, in, s, &w, out) &&
               ByLevel<DecodeV<F, BITS>>::run(level, in + k_bytes, s, &w, out + part);
    }
};

// Calls f with the Coder of that format and width.
template <class Fn>
auto with_coder(const std::string &dtype, int bits, Fn &&f) {
    if (bits != 8 && bits != 4) throw std::invalid_argument("a quantised value has 8 or 4 bits");
    const auto by_bits = [&](auto format) {
        using F = decltype(format);
        return bits == 8 ? f(Coder<F, 8>{}, Packed<8>{}) : f(Coder<F, 4>{}, Packed<4>{});
    };
    if (dtype == "bfloat16") return by_bits(BF16{});
    if (dtype == "float16") return by_bits(FP16{});
    if (dtype == "float32") return by_bits(FP32{});
    throw std::invalid_argument("only bfloat16, float16 and float32 are quantised, not " + dtype);
}

using Bytes = nb::ndarray<const uint8_t, nb::shape<-1>, nb::c_contig, nb::device::cpu>;
using Room = nb::ndarray<uint8_t, nb::shape<-1>, nb::c_contig, nb::device::cpu>;

constexpr size_t VALUES_MAX = size_t{1} << 48;

size_t value_bytes(const std::string &dtype) { return dtype == "float32" ? 4 : 2; }

// No size that is computed of a shape can wrap: each is a small multiple of the values.
void check_values(const Shape &s, size_t layers) {
    size_t values = 1;
    bool wraps = false;
    for (size_t count : {layers, s.tokens, s.kv_heads, s.head_dim})
        wraps |= __builtin_mul_overflow(values, std::max(count, size_t{1}), &values);
    if (wraps || values > VALUES_MAX) throw std::invalid_argument("a body of more values than memory can hold");
}

size_t checked_layer_bytes(const Shape &s, size_t layers, size_t nbytes, const std::string &dtype) {
    check_values(s, layers);
    const size_t layer_bytes = 2 * s.tokens * s.channels() * value_bytes(dtype);
    if (!s.channels() || nbytes != layers * layer_bytes)
        throw std::invalid_argument("a body of another size");
    return layer_bytes;
}

// Calls code(coder, level, shape, scratch, offset in raw, offset in encoded) for each layer of a body, without
// the GIL, once all sizes are known to fit. Returns the first layer for which it is false, or -1.
template <class Fn>
int64_t each_layer(size_t raw_bytes, size_t encoded_bytes, size_t layers, const Shape &s,
                   const std::string &dtype, int bits, const std::string &level_name, Fn &&code) {
    const int level = simd::level_of(level_name);
    const size_t raw_layer = checked_layer_bytes(s, layers, raw_bytes, dtype);
    return with_coder(dtype, bits, [&](auto coder, auto packed) {
        const size_t encoded_layer = packed.layer(s, value_bytes(dtype));
        if (encoded_bytes != layers * encoded_layer)
            throw std::invalid_argument("an encoded body of another size");
        nb::gil_scoped_release release;
        Scratch scratch(s.channels());
        for (size_t layer = 0; layer < layers; ++layer)
            if (!code(coder, level, s, scratch, layer * raw_layer, layer * encoded_layer))
                return static_cast<int64_t>(layer);
        return int64_t{-1};
    });
}

double encode(Bytes raw, size_t layers, size_t tokens, size_t kv_heads, size_t head_dim,
              const std::string &dtype, int bits, Room out, const std::string &level_name) {
    double worst = 0;
    const int64_t bad = each_layer(
        raw.size(), out.size(), layers, Shape{tokens, kv_heads, head_dim}, dtype, bits, level_name,
        [&](auto coder, int level, const Shape &s, Scratch &w, size_t from, size_t to) {
            return coder.encode_layer(level, raw.data() + from, s, w, out.data() + to, worst);
        });
    return bad < 0 ? worst : -1.0;
}

int64_t decode(Bytes encoded, size_t layers, size_t tokens, size_t kv_heads, size_t head_dim,
               const std::string &dtype, int bits, Room raw, const std::string &level_name) {
    return each_layer(
        raw.size(), encoded.size(), layers, Shape{tokens, kv_heads, head_dim}, dtype, bits, level_name,
        [&](auto coder, int level, const Shape &s, Scratch &w, size_t to, size_t from) {
            return coder.decode_layer(level, encoded.data() + from, s, w, raw.data() + to);
        });
}

size_t layer_bytes(size_t tokens, size_t kv_heads, size_t head_dim, const std::string &dtype, int bits) {
    const Shape s{tokens, kv_heads, head_dim};
    check_values(s, 1);
    return with_coder(dtype, bits, [&](auto, auto packed) { return packed.layer(s, value_bytes(dtype)); });
}

}  // namespace

void bind_quantise(nb::module_ &m) {
    m.def("quantised_layer_bytes", &layer_bytes, nb::arg("tokens"), nb::arg("kv_heads"), nb::arg("head_dim"),
          nb::arg("dtype"), nb::arg("bits"), "Bytes of one quantised layer.");
    m.def("quantise", &encode, nb::arg("raw"), nb::arg("layers"), nb::arg("tokens"), nb::arg("kv_heads"),
          nb::arg("head_dim"), nb::arg("dtype"), nb::arg("bits"), nb::arg("out"), nb::arg("level") = "",
          "Quantise a body into `out`; the worst channel's relative error, or -1 where that cannot be.");
    m.def("dequantise", &decode, nb::arg("encoded"), nb::arg("layers"), nb::arg("tokens"),
          nb::arg("kv_heads"), nb::arg("head_dim"), nb::arg("dtype"), nb::arg("bits"), nb::arg("raw"),
          nb::arg("level") = "",
          "Decode layers into `raw`; the first malformed one, or -1.");
}

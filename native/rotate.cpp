// Turning keys to another position: each pair (x, y) of a head becomes (x cos - y sin, y cos + x sin), in
// single precision, rounded once. The Python twin is `rotate_keys_torch` in p2pcache/blend/rotate.py.

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include "simd.h"

namespace nb = nanobind;

namespace {

constexpr size_t BLOCK = 32;  // pairs at a time, read before any is written: out may be the keys themselves

// Keys `[tokens, heads, dim]`; strides in values, the last axis contiguous. Dimensions from 2 * half on have
// no position and are copied.
struct Geometry {
    size_t tokens, heads, dim, half;
    int64_t in_token, in_head, out_token, out_head;
};

P2PC_INLINE void turn(const float *__restrict x, const float *__restrict y, const float *__restrict cos,
                      const float *__restrict sin, size_t n, float *__restrict turned_x,
                      float *__restrict turned_y) {
    for (size_t i = 0; i < n; ++i) {
        turned_x[i] = x[i] * cos[i] - y[i] * sin[i];
        turned_y[i] = y[i] * cos[i] + x[i] * sin[i];
    }
}

template <class F, bool INTERLEAVED>
struct Rotate {
    using Bits = typename F::Bits;

    static P2PC_INLINE void block(const Bits *k, const float *cos, const float *sin, size_t half, size_t n,
                                  Bits *out) {
        float x[BLOCK], y[BLOCK], turned_x[BLOCK], turned_y[BLOCK];
        const size_t step = INTERLEAVED ? 2 : 1, second = INTERLEAVED ? 1 : half;
        for (size_t i = 0; i < n; ++i) x[i] = F::load(k[step * i]);
        for (size_t i = 0; i < n; ++i) y[i] = F::load(k[step * i + second]);
        turn(x, y, cos, sin, n, turned_x, turned_y);
        for (size_t i = 0; i < n; ++i) out[step * i] = F::store(turned_x[i]);
        for (size_t i = 0; i < n; ++i) out[step * i + second] = F::store(turned_y[i]);
    }

    static P2PC_INLINE void go(const Bits *k, const float *cos, const float *sin, Geometry g, Bits *out) {
        for (size_t t = 0; t < g.tokens; ++t)
            for (size_t h = 0; h < g.heads; ++h) {
                const auto token = static_cast<int64_t>(t), head = static_cast<int64_t>(h);
                const Bits *from = k + token * g.in_token + head * g.in_head;
                Bits *to = out + token * g.out_token + head * g.out_head;
                size_t i = 0;
                const size_t step = INTERLEAVED ? 2 : 1;
                for (; i + BLOCK <= g.half; i += BLOCK)
                    block(from + step * i, cos + i, sin + i, g.half, BLOCK, to + step * i);
                if (i < g.half) block(from + step * i, cos + i, sin + i, g.half, g.half - i, to + step * i);
                if (to != from) std::copy(from + 2 * g.half, from + g.dim, to + 2 * g.half);
            }
    }
};

using Keys = nb::ndarray<nb::ro, nb::ndim<3>, nb::device::cpu>;
using Out = nb::ndarray<nb::ndim<3>, nb::device::cpu>;
using Table = nb::ndarray<const float, nb::shape<-1>, nb::c_contig, nb::device::cpu>;

template <class F>
void run(int level, bool interleaved, const void *k, Table cos, Table sin, const Geometry &g, void *out) {
    const auto *from = static_cast<const typename F::Bits *>(k);
    auto *to = static_cast<typename F::Bits *>(out);
    nb::gil_scoped_release release;
    if (interleaved)
        ByLevel<Rotate<F, true>>::run(level, from, cos.data(), sin.data(), g, to);
    else
        ByLevel<Rotate<F, false>>::run(level, from, cos.data(), sin.data(), g, to);
}

// Arrays of 16-bit or 32-bit elements of any type; `dtype` says what they are.
void rotate(Keys k, Table cos, Table sin, const std::string &dtype, bool interleaved, Out out,
            const std::string &level_name) {
    const int level = simd::level_of(level_name);
    const size_t bytes = dtype == "float32" ? 4 : 2;
    const Geometry g{k.shape(0), k.shape(1), k.shape(2), cos.shape(0),
                     k.stride(0), k.stride(1), out.stride(0), out.stride(1)};
    for (size_t axis = 0; axis < 3; ++axis)
        if (out.shape(axis) != k.shape(axis))
            throw std::invalid_argument("out has another shape than the keys");
    if (k.itemsize() != bytes || out.itemsize() != bytes)
        throw std::invalid_argument("elements are not " + dtype);
    if ((k.stride(2) != 1 || out.stride(2) != 1) && g.dim > 1)
        throw std::invalid_argument("the last axis must be contiguous");
    if (sin.shape(0) != g.half || 2 * g.half > g.dim)
        throw std::invalid_argument("angles do not fit the keys");
    if (dtype == "bfloat16") run<BF16>(level, interleaved, k.data(), cos, sin, g, out.data());
    else if (dtype == "float16") run<FP16>(level, interleaved, k.data(), cos, sin, g, out.data());
    else if (dtype == "float32") run<FP32>(level, interleaved, k.data(), cos, sin, g, out.data());
    else throw std::invalid_argument("keys are bfloat16, float16 or float32, not " + dtype);
}

}  // namespace

void bind_rotate(nb::module_ &m) {
    m.def("rotate_keys", &rotate, nb::arg("k"), nb::arg("cos"), nb::arg("sin"), nb::arg("dtype"),
          nb::arg("interleaved"), nb::arg("out"), nb::arg("level") = "",
          "Turn keys [tokens, heads, dim] by the angles whose cosines and sines are given, into `out`.");
}

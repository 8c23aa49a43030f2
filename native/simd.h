// One kernel, compiled once a level of the CPU's vector instructions, and chosen as it runs.
//
// Kernels are plain loops that the compiler vectorises: a level changes how many values are worked on at
// once and never a bit of the result. All arithmetic is IEEE single precision without contraction to FMA
// (see CMakeLists.txt), so that every level and the Python twins agree to the bit.

#pragma once

#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#define P2PC_INLINE inline __attribute__((always_inline))

#if defined(__x86_64__) && defined(__GNUC__)
#define P2PC_AVX2 __attribute__((target("avx2")))
#define P2PC_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,prefer-vector-width=512")))
#define P2PC_HAS_LEVELS 1
#else
#define P2PC_AVX2
#define P2PC_AVX512
#define P2PC_HAS_LEVELS 0
#endif

// Defines `run(level, args...)`, which calls `Kernel::go(args...)`, a P2PC_INLINE static member, as compiled
// for that level.
template <class Kernel>
struct ByLevel {
    template <class... Args>
    static auto plain(Args... args) { return Kernel::go(args...); }
    template <class... Args>
    P2PC_AVX2 static auto avx2(Args... args) { return Kernel::go(args...); }
    template <class... Args>
    P2PC_AVX512 static auto avx512(Args... args) { return Kernel::go(args...); }
    template <class... Args>
    static auto run(int level, Args... args) {
        if (level == 2) return avx512(args...);
        if (level == 1) return avx2(args...);
        return plain(args...);
    }
};

namespace simd {

inline const char *const LEVELS[] = {"plain", "avx2", "avx512"};

// How many of LEVELS this CPU can run, at least one.
inline int level_count() {
#if P2PC_HAS_LEVELS
    if (!__builtin_cpu_supports("avx2")) return 1;
    const bool wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    return wide ? 3 : 2;
#else
    return 1;
#endif
}

// The level of that name; "" is the best one. Throws for one that this CPU cannot run.
inline int level_of(const std::string &name) {
    static const int count = level_count();
    if (name.empty()) return count - 1;
    for (int level = 0; level < count; ++level)
        if (name == LEVELS[level]) return level;
    throw std::invalid_argument("this CPU has no level '" + name + "'");
}

}  // namespace simd

// Number formats. Conversions are without branches, so that loops over them vectorise.

template <class To, class From>
P2PC_INLINE To bit_cast(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

// The bits of a value, wherever they lie: bodies come as bytes.
typedef uint16_t __attribute__((aligned(1), may_alias)) Word;
typedef float __attribute__((aligned(1), may_alias)) Single;

struct BF16 {
    using Bits = Word;
    static P2PC_INLINE float load(Bits x) { return bit_cast<float>(uint32_t{x} << 16); }
    // To nearest, ties to even; a NaN stays one.
    static P2PC_INLINE Bits store(float f) {
        const uint32_t u = bit_cast<uint32_t>(f);
        const uint32_t rounded = (u + 0x7FFF + ((u >> 16) & 1)) >> 16;
        return static_cast<Bits>((u & 0x7FFFFFFF) > 0x7F800000 ? 0x7FC0 : rounded);
    }
};

struct FP16 {
    using Bits = Word;
    static P2PC_INLINE float load(Bits x) {
        const uint32_t magnitude = x & 0x7FFF, sign = (x & 0x8000u) << 16;
        // Five exponent bits to eight: the bias is made up by a multiplication, which also normalises.
        const uint32_t finite = bit_cast<uint32_t>(bit_cast<float>(magnitude << 13) * 0x1p112f);
        return bit_cast<float>(sign | (magnitude >= 0x7C00 ? (magnitude << 13) | 0x7F800000u : finite));
    }
    // To nearest, ties to even; from 65520 on infinite; a NaN stays one.
    static P2PC_INLINE Bits store(float f) {
        const uint32_t u = bit_cast<uint32_t>(f), magnitude = u & 0x7FFFFFFF, sign = (u >> 16) & 0x8000;
        const uint32_t normal = (magnitude + 0xFFF + ((magnitude >> 13) & 1) - (112u << 23)) >> 13;
        // Beside 0.5 the last place of a float is that of a subnormal half, so the addition rounds.
        const uint32_t tiny = bit_cast<uint32_t>(bit_cast<float>(magnitude) + 0.5f) - 0x3F000000u;
        uint32_t half = magnitude < (113u << 23) ? tiny : normal;
        half = magnitude >= 0x477FF000u ? 0x7C00 : half;
        half = magnitude > 0x7F800000u ? 0x7E00 : half;
        return static_cast<Bits>(sign | half);
    }
};

struct FP32 {
    using Bits = Single;
    static P2PC_INLINE float load(Bits x) { return x; }
    static P2PC_INLINE Bits store(float f) { return f; }
};

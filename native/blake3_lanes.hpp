// Keyed BLAKE3 of many short inputs, eight of them side by side in the lanes of a vector.
//
// A prompt's chunks are about a kilobyte each, which is one chunk of BLAKE3 or a few: too short for a
// hash that finds its parallelism within one input. So lanes are filled across inputs, and a lane that
// has ended its input takes the next one at once.
//
// Included by one source file an instruction set, each with flags and a namespace of its own. Vectors are
// the compilers' own extension: the same lines become AVX2, SSE2 or NEON.
//
// Source: O'Connor, Aumasson, Neves, Wilcox-O'Hearn, "BLAKE3: one function, fast everywhere" (2020).

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "blake3.hpp"

namespace {

constexpr int LANES = 8;
typedef uint32_t Lanes __attribute__((vector_size(4 * LANES)));

constexpr uint32_t IV[4] = {0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A};

// Which word of the block each half-step of a round takes: the identity, then BLAKE3's permutation of it.
constexpr uint8_t SCHEDULE[7][16] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
    {2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8},
    {3, 4, 10, 12, 13, 2, 7, 14, 6, 5, 9, 0, 11, 15, 8, 1},
    {10, 7, 12, 9, 14, 3, 13, 15, 4, 0, 11, 2, 5, 8, 1, 6},
    {12, 13, 9, 11, 15, 10, 14, 8, 7, 2, 5, 3, 0, 1, 6, 4},
    {9, 14, 11, 5, 8, 12, 15, 1, 13, 3, 0, 10, 2, 6, 4, 7},
    {11, 15, 5, 0, 1, 9, 8, 6, 14, 10, 2, 12, 3, 4, 7, 13},
};

template <typename Word>
inline __attribute__((always_inline)) void mix(Word &a, Word &b, Word &c, Word &d, const Word &x,
                                               const Word &y) {
    a += b + x;
    d ^= a;
    d = (d >> 16) | (d << 16);
    c += d;
    b ^= c;
    b = (b >> 12) | (b << 20);
    a += b + y;
    d ^= a;
    d = (d >> 8) | (d << 24);
    c += d;
    b ^= c;
    b = (b >> 7) | (b << 25);
}

// The compression function, of words or of lanes of words. cv is replaced by the first half of the output.
template <typename Word>
inline __attribute__((always_inline)) void compress(Word cv[8], const Word block[16], Word counter_low,
                                                    Word counter_high, Word block_bytes, Word flags) {
    Word v[16];
    for (int i = 0; i < 8; ++i) v[i] = cv[i];
    for (int i = 0; i < 4; ++i) v[8 + i] = Word{} + IV[i];
    v[12] = counter_low;
    v[13] = counter_high;
    v[14] = block_bytes;
    v[15] = flags;
#pragma GCC unroll 7
    for (int round = 0; round < 7; ++round) {
        const uint8_t *s = SCHEDULE[round];
        mix(v[0], v[4], v[8], v[12], block[s[0]], block[s[1]]);
        mix(v[1], v[5], v[9], v[13], block[s[2]], block[s[3]]);
        mix(v[2], v[6], v[10], v[14], block[s[4]], block[s[5]]);
        mix(v[3], v[7], v[11], v[15], block[s[6]], block[s[7]]);
        mix(v[0], v[5], v[10], v[15], block[s[8]], block[s[9]]);
        mix(v[1], v[6], v[11], v[12], block[s[10]], block[s[11]]);
        mix(v[2], v[7], v[8], v[13], block[s[12]], block[s[13]]);
        mix(v[3], v[4], v[9], v[14], block[s[14]], block[s[15]]);
    }
    for (int i = 0; i < 8; ++i) cv[i] = v[i] ^ v[8 + i];
}

void compress_one(uint32_t cv[8], const uint8_t block[BLOCK_BYTES], uint32_t block_bytes, uint32_t flags) {
    uint32_t words[16];
    std::memcpy(words, block, sizeof words);
    compress<uint32_t>(cv, words, 0, 0, block_bytes, flags);
}

void run_jobs(const Blake3Job *jobs, size_t count, const uint32_t key[8], uint32_t flags) {
    static const uint8_t nothing[BLOCK_BYTES] = {};
    struct Lane {
        const uint8_t *at = nothing;
        uint32_t left = 0;  // bytes of the job that are still to be compressed
        uint32_t start = 0;
        const Blake3Job *job = nullptr;
    } lanes[LANES];
    Lanes cv[8], block[16];
    Lanes counter_low{}, block_bytes{}, block_flags{};
    const Lanes counter_high{};
    for (int i = 0; i < 8; ++i) cv[i] = Lanes{} + key[i];

    size_t next = 0, running = 0;
    while (true) {
        for (int l = 0; l < LANES; ++l) {
            Lane &lane = lanes[l];
            if (lane.job == nullptr && next < count) {
                const Blake3Job *job = &jobs[next++];
                lane = {job->data, job->nbytes, job->start_flags, job};
                counter_low[l] = job->counter;
                for (int i = 0; i < 8; ++i) cv[i][l] = key[i];
                ++running;
            }
            const uint32_t now = lane.left < BLOCK_BYTES ? lane.left : BLOCK_BYTES;
            block_bytes[l] = now;
            block_flags[l] = flags | lane.start | (lane.job && lane.left == now ? lane.job->end_flags : 0);
            for (int i = 0; i < 16; ++i) {
                uint32_t word;
                std::memcpy(&word, lane.at + 4 * i, 4);
                block[i][l] = word;
            }
        }
        if (!running) return;
        compress<Lanes>(cv, block, counter_low, counter_high, block_bytes, block_flags);
        for (int l = 0; l < LANES; ++l) {
            Lane &lane = lanes[l];
            if (lane.job == nullptr) continue;
            lane.start = 0;
            if (lane.left > BLOCK_BYTES) {
                lane.left -= BLOCK_BYTES;
                lane.at += BLOCK_BYTES;
            } else {
                for (int i = 0; i < 8; ++i) lane.job->cv[i] = cv[i][l];
                lane = {};
                --running;
            }
        }
    }
}

}  // namespace

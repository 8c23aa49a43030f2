// The parts of BLAKE3 that naming chunks needs; blake3_lanes.hpp says how they are made fast.

#pragma once

#include <cstddef>
#include <cstdint>

constexpr size_t BLOCK_BYTES = 64;
constexpr size_t BLAKE3_CHUNK_BYTES = 1024;
enum Blake3Flags : uint32_t { CHUNK_START = 1, CHUNK_END = 2, PARENT = 4, ROOT = 8, KEYED = 16 };

// A chain of compressions that begins at the key: one BLAKE3 chunk, or one parent node.
struct Blake3Job {
    const uint8_t *data;  // readable, and zero, up to a whole number of blocks
    uint32_t nbytes;      // 1 to BLAKE3_CHUNK_BYTES
    uint32_t counter;     // the chunk's index in its input
    uint32_t start_flags, end_flags;  // of the first and of the last block, beside the common ones
    uint32_t *cv;                     // 8 words: what comes out
};

struct Blake3 {
    void (*run_jobs)(const Blake3Job *jobs, size_t count, const uint32_t key[8], uint32_t flags);
    // One block with counter 0 on `cv`, which is replaced.
    void (*compress_one)(uint32_t cv[8], const uint8_t block[BLOCK_BYTES], uint32_t nbytes, uint32_t flags);
    const char *name;
};

extern const Blake3 BLAKE3_PORTABLE;
extern const Blake3 BLAKE3_AVX2;  // nullptrs where the architecture has none

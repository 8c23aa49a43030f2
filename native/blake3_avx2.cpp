// BLAKE3 for CPUs with AVX2: compiled with -mavx2 where the architecture has it, and called only there.

#include "blake3_lanes.hpp"

#if defined(__AVX2__)
const Blake3 BLAKE3_AVX2 = {run_jobs, compress_one, "avx2"};
#else
const Blake3 BLAKE3_AVX2 = {nullptr, nullptr, "avx2"};
#endif

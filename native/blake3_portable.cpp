// BLAKE3 with the vectors that every CPU of the architecture has.

#include "blake3_lanes.hpp"

const Blake3 BLAKE3_PORTABLE = {run_jobs, compress_one, "portable"};

// Content-defined chunking of token runs with a Gear hash. The Python twin in
// p2pcache/core/chunking.py is the oracle: both must cut alike, to the token.
//
// h = (h << 8) + mix(token): after 8 tokens a token has been shifted out, so whether a place is a
// cut depends on the last 8 tokens alone and never on where the chunk began. That is what makes
// a document's inner cuts the same at any offset, and what makes cuts meet again after an edit. The usual
// shift by 1 would have a seam or an edit disturb the cuts of the next 64 tokens: tokens say more than bytes do.
//
// Source: Xia et al., "FastCDC" (2016), with tokens for bytes and a mixing function for its table.

#include <cstdint>
#include <stdexcept>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

namespace nb = nanobind;

namespace {

// Murmur3's finaliser over the token and a constant: a token id's few bits must reach the top ones.
inline uint64_t mix(uint32_t token) {
    uint64_t x = token + 0x9E3779B97F4A7C15ull;
    x = (x ^ (x >> 33)) * 0xFF51AFD7ED558CCDull;
    x = (x ^ (x >> 33)) * 0xC4CEB9FE1A85EC53ull;
    return x ^ (x >> 33);
}

// Ends of the chunks, ascending; the last one is `count`. The hash runs over every token, those
// before the minimum too: a place is judged by its own 8 tokens, whoever asks.
std::vector<int64_t> gear_cuts(const uint32_t *tokens, size_t count, size_t min_tokens,
                               uint64_t threshold, size_t max_tokens) {
    std::vector<int64_t> cuts;
    cuts.reserve(count / min_tokens + 1);
    constexpr int shift = 8;
    uint64_t hash = 0;
    size_t start = 0;
    for (size_t i = 0; i < count; ++i) {
        hash = (hash << shift) + mix(tokens[i]);
        const size_t length = i + 1 - start;
        if ((hash < threshold && length >= min_tokens) || length == max_tokens) {
            cuts.push_back(static_cast<int64_t>(i + 1));
            start = i + 1;
        }
    }
    if (start < count) cuts.push_back(static_cast<int64_t>(count));
    return cuts;
}

using Tokens = nb::ndarray<const uint32_t, nb::numpy, nb::shape<-1>, nb::c_contig, nb::device::cpu>;

nb::ndarray<nb::numpy, int64_t, nb::ndim<1>> cut(Tokens tokens, size_t min_tokens,
                                                  uint64_t threshold, size_t max_tokens) {
    if (min_tokens < 1 || max_tokens < min_tokens)
        throw std::invalid_argument("chunk sizes must be 1 <= min_tokens <= max_tokens");
    std::vector<int64_t> *cuts;
    {
        nb::gil_scoped_release release;
        cuts = new std::vector<int64_t>(
            gear_cuts(tokens.data(), tokens.shape(0), min_tokens, threshold, max_tokens));
    }
    nb::capsule owner(cuts, [](void *p) noexcept { delete static_cast<std::vector<int64_t> *>(p); });
    return nb::ndarray<nb::numpy, int64_t, nb::ndim<1>>(cuts->data(), {cuts->size()}, owner);
}

}  // namespace

void bind_chunking(nb::module_ &m) {
    m.def("gear_cuts", &cut, nb::arg("tokens").noconvert(), nb::arg("min_tokens"), nb::arg("threshold"),
          nb::arg("max_tokens"),
          "Ends of content-defined chunks of `tokens` (uint32 [n]); see p2pcache/core/chunking.py.");
}

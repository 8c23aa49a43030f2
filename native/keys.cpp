// Names of the chunks of a prompt. The Python twin in p2pcache/core/keys.py is the oracle, and its
// docstring says what is hashed.

#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "blake3.hpp"

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "tokens are hashed as little-endian words");

namespace nb = nanobind;

namespace {

constexpr size_t KEY_BYTES = 16, DIGEST_BYTES = 32, NAMESPACE_BYTES = 32;
constexpr char CONTENT[] = "content", EXACT[] = "exact";
constexpr size_t CONTENT_BYTES = sizeof CONTENT - 1, EXACT_BYTES = sizeof EXACT - 1;
constexpr size_t BATCH_BYTES = 64 << 10;  // of inputs at a time: they stay in the first or second cache

using Span = std::pair<size_t, size_t>;
using Tokens = nb::ndarray<const uint32_t, nb::numpy, nb::shape<-1>, nb::c_contig, nb::device::cpu>;

struct ChunkName {
    uint8_t digest[DIGEST_BYTES];
    uint8_t exact[KEY_BYTES];
};

struct Extra {
    const char *data = nullptr;
    size_t nbytes = 0;
};

const Blake3 &implementation(const std::string &name) {
    const bool avx2 = BLAKE3_AVX2.run_jobs != nullptr
#if defined(__x86_64__)
                      && __builtin_cpu_supports("avx2")
#endif
        ;
    if (name == "avx2" && !avx2) throw std::invalid_argument("this CPU has no AVX2");
    if (name != "avx2" && name != "portable" && !name.empty())
        throw std::invalid_argument("implementations are avx2 and portable");
    return name == "portable" || !avx2 ? BLAKE3_PORTABLE : BLAKE3_AVX2;
}

size_t ceil_div(size_t a, size_t b) { return (a + b - 1) / b; }

// Keyed hashes of a batch of inputs: the chunks of all side by side, then their trees level by level.
class Batch {
public:
    Batch(const Blake3 &blake3, const uint32_t key[8]) : blake3_(blake3), key_(key) {}

    // Room for one more input, zeroed up to whole blocks. out: 32 bytes, written by `finish`.
    uint8_t *add(size_t nbytes, uint8_t *out) {
        inputs_.push_back({bytes_.size(), nbytes, ceil_div(nbytes, BLAKE3_CHUNK_BYTES), out});
        bytes_.resize(bytes_.size() + ceil_div(nbytes, BLOCK_BYTES) * BLOCK_BYTES);
        return bytes_.data() + inputs_.back().at;
    }

    size_t nbytes() const { return bytes_.size(); }

    void finish() {
        size_t nodes = 0;
        for (const Input &input : inputs_) nodes += input.nodes;
        cvs_.resize(8 * nodes);
        jobs_.clear();
        uint32_t *cv = cvs_.data();
        for (const Input &input : inputs_)
            for (size_t i = 0; i < input.nodes; ++i, cv += 8) {
                const size_t at = i * BLAKE3_CHUNK_BYTES, left = input.nbytes - at;
                jobs_.push_back({bytes_.data() + input.at + at,
                                 static_cast<uint32_t>(left < BLAKE3_CHUNK_BYTES ? left : BLAKE3_CHUNK_BYTES),
                                 static_cast<uint32_t>(i), CHUNK_START,
                                 CHUNK_END | (input.nodes == 1 ? ROOT : 0u), cv});
            }
        blake3_.run_jobs(jobs_.data(), jobs_.size(), key_, KEYED);
        while (join_pairs()) {}
        cv = cvs_.data();
        for (const Input &input : inputs_) {
            std::memcpy(input.out, cv, DIGEST_BYTES);
            cv += 8;
        }
        inputs_.clear();
        bytes_.clear();
    }

private:
    struct Input {
        size_t at, nbytes, nodes;  // nodes: of the tree's present level
        uint8_t *out;
    };

    // One level up in every tree: neighbours become parents, an odd last node goes up as it is. That is
    // BLAKE3's tree, whose left halves are as large as a power of two lets them. False at the roots.
    bool join_pairs() {
        next_.clear();
        jobs_.clear();
        size_t nodes = 0;
        for (const Input &input : inputs_) nodes += ceil_div(input.nodes, 2);
        next_.resize(8 * nodes);
        const uint32_t *from = cvs_.data();
        uint32_t *to = next_.data();
        for (Input &input : inputs_) {
            for (size_t i = 0; i + 1 < input.nodes; i += 2, from += 16, to += 8)
                jobs_.push_back({reinterpret_cast<const uint8_t *>(from), BLOCK_BYTES, 0, PARENT,
                                 input.nodes == 2 ? ROOT : 0u, to});
            if (input.nodes % 2) {
                std::memcpy(to, from, DIGEST_BYTES);
                from += 8, to += 8;
            }
            input.nodes = ceil_div(input.nodes, 2);
        }
        if (jobs_.empty()) return false;
        blake3_.run_jobs(jobs_.data(), jobs_.size(), key_, KEYED);
        cvs_.swap(next_);
        return true;
    }

    const Blake3 &blake3_;
    const uint32_t *key_;
    std::vector<Input> inputs_;
    std::vector<uint8_t> bytes_;
    std::vector<Blake3Job> jobs_;
    std::vector<uint32_t> cvs_, next_;
};

void hash_contents(const Blake3 &blake3, const uint32_t key[8], const uint32_t *tokens,
                   const std::vector<Span> &spans, const std::vector<Extra> &extras, ChunkName *names) {
    Batch batch(blake3, key);
    for (size_t i = 0; i < spans.size(); ++i) {
        const uint64_t count = spans[i].second - spans[i].first;
        const Extra extra = extras.empty() ? Extra{} : extras[i];
        uint8_t *at = batch.add(CONTENT_BYTES + sizeof count + 4 * count + extra.nbytes, names[i].digest);
        std::memcpy(at, CONTENT, CONTENT_BYTES);
        std::memcpy(at += CONTENT_BYTES, &count, sizeof count);
        std::memcpy(at += sizeof count, tokens + spans[i].first, 4 * count);
        if (extra.nbytes) std::memcpy(at + 4 * count, extra.data, extra.nbytes);
        if (batch.nbytes() >= BATCH_BYTES) batch.finish();
    }
    batch.finish();
}

void chain(const Blake3 &blake3, const uint32_t key[8], const uint8_t *parent, ChunkName *names,
           size_t count) {
    uint8_t block[BLOCK_BYTES] = {};
    std::memcpy(block, EXACT, EXACT_BYTES);
    for (size_t i = 0; i < count; ++i) {
        std::memcpy(block + EXACT_BYTES, parent, KEY_BYTES);
        std::memcpy(block + EXACT_BYTES + KEY_BYTES, names[i].digest, DIGEST_BYTES);
        uint32_t cv[8];
        std::memcpy(cv, key, sizeof cv);
        blake3.compress_one(cv, block, EXACT_BYTES + KEY_BYTES + DIGEST_BYTES,
                            KEYED | CHUNK_START | CHUNK_END | ROOT);
        std::memcpy(names[i].exact, cv, KEY_BYTES);
        parent = names[i].exact;
    }
}

nb::object bytes_object(const uint8_t *data, size_t nbytes) {
    return nb::bytes(reinterpret_cast<const char *>(data), nbytes);
}

nb::list name_chunks(nb::bytes namespace_key, Tokens tokens, const std::vector<Span> &spans,
                     nb::bytes parent, nb::sequence extras, const std::string &use) {
    if (namespace_key.size() != NAMESPACE_BYTES) throw std::invalid_argument("a namespace key has 32 bytes");
    if (parent.size() != KEY_BYTES) throw std::invalid_argument("an exact key has 16 bytes");
    for (const auto &[start, stop] : spans)
        if (start > stop || stop > tokens.shape(0))
            throw std::invalid_argument("a span is not within the tokens");
    std::vector<Extra> more;
    const nb::tuple kept(extras);  // keeps them alive while the GIL is not held
    for (nb::handle extra : kept) {
        if (!nb::isinstance<nb::bytes>(extra)) throw nb::type_error("extras are bytes");
        const nb::bytes raw = nb::borrow<nb::bytes>(extra);
        more.push_back({raw.c_str(), raw.size()});
    }
    if (!more.empty() && more.size() < spans.size())
        throw std::invalid_argument("there are fewer extras than spans");
    const Blake3 &blake3 = implementation(use);
    std::vector<ChunkName> names(spans.size());
    {
        nb::gil_scoped_release release;
        uint32_t key[8];
        std::memcpy(key, namespace_key.c_str(), sizeof key);
        hash_contents(blake3, key, tokens.data(), spans, more, names.data());
        chain(blake3, key, reinterpret_cast<const uint8_t *>(parent.c_str()), names.data(), names.size());
    }
    nb::list rows;
    for (size_t i = 0; i < spans.size(); ++i)
        rows.append(nb::make_tuple(spans[i].first, spans[i].second,
                                   bytes_object(names[i].digest, DIGEST_BYTES),
                                   bytes_object(names[i].digest, KEY_BYTES),
                                   bytes_object(names[i].exact, KEY_BYTES)));
    return rows;
}

}  // namespace

void bind_keys(nb::module_ &m) {
    m.def("name_chunks", &name_chunks, nb::arg("namespace_key"), nb::arg("tokens").noconvert(),
          nb::arg("spans"), nb::arg("parent"), nb::arg("extras") = nb::make_tuple(), nb::arg("use") = "",
          "(start, stop, digest, content key, exact key) of each chunk; see p2pcache/core/keys.py. `use`: "
          "avx2 or portable; default: the best that this CPU has.");
}

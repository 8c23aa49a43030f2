// What the native tables of bodies share: 16-byte keys, records that are named by 32-bit numbers, and
// a hash table of chains over them.
//
// The table is Litwin's linear hashing ("Linear hashing: a new tool for file and table addressing",
// 1980): it grows by one bucket at a time, so that no insertion ever has to move everything.

#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <stdexcept>
#include <vector>

#include <nanobind/nanobind.h>

namespace p2pcache {

constexpr uint32_t NONE = 0xFFFFFFFFu;  // no record
constexpr size_t KEY_BYTES = 16;

// Of this process alone: nobody else can choose keys that collide.
inline uint64_t random_word() {
    std::random_device random;
    return uint64_t{random()} << 32 | random();
}
inline const uint64_t HASH_SEED[2] = {random_word(), random_word()};

struct Key {
    uint64_t low, high;
    bool operator==(const Key &other) const { return low == other.low && high == other.high; }
    // Peers choose keys, so both halves are seeded before they meet; the finaliser is for plain keys.
    uint64_t hash() const {
        const unsigned __int128 product =
            static_cast<unsigned __int128>(low ^ HASH_SEED[0]) * (high ^ HASH_SEED[1]);
        uint64_t x = static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
        x = (x ^ (x >> 33)) * 0xFF51AFD7ED558CCDull;
        return x ^ (x >> 33);
    }
};

inline bool is_key(nanobind::handle value) {
    return PyBytes_Check(value.ptr()) && PyBytes_GET_SIZE(value.ptr()) == (Py_ssize_t) KEY_BYTES;
}

// Raises ValueError for anything but 16 bytes.
inline Key key_of(nanobind::handle value) {
    if (!is_key(value)) throw nanobind::value_error("a key is 16 bytes");
    Key key;
    std::memcpy(&key, PyBytes_AS_STRING(value.ptr()), KEY_BYTES);
    return key;
}

inline nanobind::bytes bytes_of(const Key &key) {
    return nanobind::bytes(reinterpret_cast<const char *>(&key), KEY_BYTES);
}

// Records of one kind in blocks that never move. T has a member `uint32_t next`, free ones are chained by it.
template <typename T> class Pool {
public:
    Pool() = default;
    Pool(const Pool &) = delete;
    T &operator[](uint32_t index) { return blocks_[index >> BITS][index & (SIZE - 1)]; }
    const T &operator[](uint32_t index) const { return blocks_[index >> BITS][index & (SIZE - 1)]; }

    uint32_t take() {
        if (free_ != NONE) {
            const uint32_t index = free_;
            free_ = (*this)[index].next;
            return index;
        }
        if (end_ == NONE) throw std::length_error("a table is full");
        if ((end_ & (SIZE - 1)) == 0) blocks_.emplace_back(new T[SIZE]);
        return end_++;
    }
    void give_back(uint32_t index) {
        (*this)[index] = T{};
        (*this)[index].next = free_;
        free_ = index;
    }
    // One above the highest number ever used.
    uint32_t end() const { return end_; }
    size_t nbytes() const { return blocks_.size() * SIZE * sizeof(T); }

private:
    static constexpr unsigned BITS = 10;
    static constexpr uint32_t SIZE = 1u << BITS;
    std::vector<std::unique_ptr<T[]>> blocks_;
    uint32_t free_ = NONE, end_ = 0;
};

// Heads of the chains. A chain keeps the order in which records came, also when its bucket is split.
class Buckets {
public:
    uint32_t &head(uint64_t hash) { return heads_[at(hash)]; }
    size_t size() const { return heads_.size(); }
    size_t nbytes() const { return heads_.capacity() * sizeof(uint32_t); }

    // One more bucket: it takes its share of the records of the one that it is split from.
    template <typename T, typename HashOf> void grow(Pool<T> &pool, HashOf hash_of) {
        const size_t fresh = heads_.size();
        if (fresh == 2 * half_) half_ *= 2;
        heads_.push_back(NONE);
        uint32_t walk = heads_[fresh - half_];
        uint32_t *ends[2] = {&heads_[fresh - half_], &heads_[fresh]};
        while (walk != NONE) {
            uint32_t *&end = ends[at(hash_of(pool[walk])) == fresh];
            *end = walk;
            end = &pool[walk].next;
            walk = pool[walk].next;
        }
        *ends[0] = *ends[1] = NONE;
    }

private:
    size_t at(uint64_t hash) const {
        const size_t wide = hash & (2 * half_ - 1);
        return wide < heads_.size() ? wide : wide & (half_ - 1);
    }
    std::vector<uint32_t> heads_ = {NONE};
    size_t half_ = 1;  // the largest power of two that is not above the number of buckets
};

}  // namespace p2pcache

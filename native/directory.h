// One node's shard of the directory, compact. The Python twin is `PlainDirectory` of
// p2pcache/core/directory_twin.py, which says what it all means; both answer alike.
//
// A body is one record of 104 bytes, with what its first holder said of it inside; further holders are
// chained behind it. Bodies hang in hash chains by content key, in the order in which they were first
// heard of. Names of holders and of codecs are stored once and counted.
//
// Any thread may call: publishing, withdrawing and expiring come from Python, reading also from the thread
// that answers peers. Nobody who has the lock waits for the GIL.

#pragma once

#include <algorithm>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "found.h"
#include "table.h"

namespace p2pcache {

// What one holder said last of one body.
struct Entry {
    int64_t seq;
    double expires_s;
    uint32_t holder;
    uint32_t next;  // the body's next holder, NONE: the last
    uint8_t tier;
    bool gone;  // a tombstone
};

struct Body {
    Key content, exact;
    int64_t tokens, nbytes, base_position;
    Entry first;
    uint32_t next;  // in the chain of its bucket
    uint32_t codec;
    uint8_t provenance;
    bool known;  // false: only a withdrawal of it has been heard of so far
    bool used;   // false: a free record
};
static_assert(sizeof(Body) == 104, "the memory of a directory is counted in these");

// Texts, each with a number beside it, as small integers; one that nothing uses any more is forgotten.
class Names {
public:
    struct Item {
        std::string text;
        int64_t number = 0;
        size_t uses = 0;
        uint64_t asked = 0;  // the lookup in which `live` was found out
        bool live = false;
        uint64_t listed = 0;  // the lookup in whose table it stands, and where
        uint32_t place = 0;
    };

    uint32_t add(const std::string &text, int64_t number) {
        const auto [it, fresh] = ids_.try_emplace(id_of(text, number), NONE);
        if (fresh) {
            if (free_.empty()) {
                it->second = static_cast<uint32_t>(items_.size());
                items_.push_back({text, number});
            } else {
                it->second = free_.back();
                free_.pop_back();
                items_[it->second] = {text, number};
            }
        }
        ++items_[it->second].uses;
        return it->second;
    }
    void retain(uint32_t id) { ++items_[id].uses; }
    void drop(uint32_t id) {
        Item &item = items_[id];
        if (--item.uses) return;
        ids_.erase(id_of(item.text, item.number));
        free_.push_back(id);
        item.text.clear();
    }
    Item &operator[](uint32_t id) { return items_[id]; }
    size_t size() const { return ids_.size(); }

private:
    static std::string id_of(const std::string &text, int64_t number) {
        return std::string(reinterpret_cast<const char *>(&number), sizeof number).append(text);
    }
    std::unordered_map<std::string, uint32_t> ids_;
    std::vector<Item> items_;
    std::vector<uint32_t> free_;
};

// What a holder says of a body that it has.
struct BodySaid {
    Key content, exact;
    int64_t tokens, nbytes, base_position;
    uint8_t provenance;
    std::string codec;
};

// The columns of `p2pcache.core.found.Table`.
struct FoundColumns {
    std::vector<std::string> names, codecs;
    std::vector<int64_t> incarnations;
    std::string counts, bodies, holders;
};

class Directory {
public:
    Directory(double ttl_s, double tombstone_s, size_t bodies_max)
        : ttl_s_(ttl_s), tombstone_s_(tombstone_s), bodies_max_(bodies_max) {}

    // A holder's number, kept for as long as a message of it is being read.
    class Use {
    public:
        Use(Directory &d, const std::string &name, int64_t incarnation) : d_(d) {
            const Lock lock(d.mutex_);
            id = d.holders_.add(name, incarnation);
        }
        ~Use() {
            const Lock lock(d_.mutex_);
            d_.holders_.drop(id);
        }
        Use(const Use &) = delete;
        uint32_t id;

    private:
        Directory &d_;
    };

    // False where what is said is old news, or there is no room for it.
    bool publish(const Use &holder, uint8_t tier, const BodySaid &said, int64_t seq, double now_s) {
        const Lock lock(mutex_);
        const Entry entry = {seq, now_s + ttl_s_, holder.id, NONE, tier, false};
        const uint32_t index = put(said.content, said.exact, entry, true);
        if (index == NONE) return false;
        Body &body = bodies_[index];
        const uint32_t codec = codecs_.add(said.codec, 0);
        if (body.known) codecs_.drop(body.codec);
        body.tokens = said.tokens;
        body.nbytes = said.nbytes;
        body.base_position = said.base_position;
        body.provenance = said.provenance;
        body.codec = codec;
        body.known = true;
        return true;
    }

    bool withdraw(const Use &holder, const Key &content, const Key &exact, int64_t seq, double now_s) {
        const Lock lock(mutex_);
        // Even where nothing is known to withdraw: the publish may still be on its way here.
        return put(content, exact, {seq, now_s + tombstone_s_, holder.id, NONE, 0, true}, false) != NONE;
    }

    // What is known of `count` keys, joined. `is_live(id, name, incarnation)` is asked once a holder and call,
    // with the lock held. What a table has no room for is left out.
    template <typename IsLive>
    FoundColumns table(const char *keys, size_t count, double now_s, const IsLive &is_live) {
        const Lock lock(mutex_);
        ++calls_;
        FoundColumns out;
        out.counts.reserve(count);
        out.bodies.reserve(count * sizeof(FoundBody));
        out.holders.reserve(2 * count * sizeof(FoundHolder));
        each(keys, count, [&](const Body *body) {
            if (!body)
                out.counts.push_back(0);
            else if (out.counts.back() < static_cast<char>(FOUND_BODIES_MAX))
                out.counts.back() += write(*body, now_s, is_live, out);
        });
        return out;
    }

    // Those who hold, or held, anything under these keys: (number, name, incarnation).
    std::vector<std::tuple<uint32_t, std::string, int64_t>> holders(const char *keys, size_t count) {
        const Lock lock(mutex_);
        ++calls_;
        std::vector<std::tuple<uint32_t, std::string, int64_t>> out;
        each(keys, count, [&](const Body *body) {
            for (const Entry *e = body ? &body->first : nullptr; e; e = e->next == NONE ? nullptr : &more_[e->next]) {
                Names::Item &who = holders_[e->holder];
                if (who.asked != calls_) out.emplace_back(e->holder, who.text, who.number);
                who.asked = calls_;
            }
        });
        return out;
    }

    // Looks at `batch_max` records at most and goes on from there the next time.
    size_t expire(double now_s, size_t batch_max) {
        const Lock lock(mutex_);
        size_t dropped = 0;
        for (; batch_max && sweep_ < bodies_.end(); --batch_max, ++sweep_) {
            Body &body = bodies_[sweep_];
            if (!body.used) continue;
            bool left = true;
            while (left && body.first.expires_s <= now_s) {
                left = drop_first(body);
                ++dropped;
            }
            if (!left) {
                unhook(sweep_);
                continue;
            }
            for (Entry *e = &body.first; e->next != NONE;) {
                const uint32_t after = e->next;
                if (more_[after].expires_s <= now_s) {
                    e->next = more_[after].next;
                    holders_.drop(more_[after].holder);
                    more_.give_back(after);
                    ++dropped;
                } else {
                    e = &more_[after];
                }
            }
        }
        if (sweep_ >= bodies_.end()) sweep_ = 0;
        return dropped;
    }

    size_t holders() const {
        const Lock lock(mutex_);
        return holders_.size();
    }
    size_t keys() const {
        const Lock lock(mutex_);
        return keys_;
    }
    size_t nbytes() const {
        const Lock lock(mutex_);
        return bodies_.nbytes() + more_.nbytes() + buckets_.nbytes();
    }

private:
    using Lock = std::lock_guard<std::mutex>;

    // For each key nullptr, and then each body that is known under it.
    template <typename Do> void each(const char *keys, size_t count, const Do &visit) {
        for (; count; --count, keys += KEY_BYTES) {
            Key content;
            std::memcpy(&content, keys, KEY_BYTES);
            visit(nullptr);
            for (uint32_t i = buckets_.head(content.hash()); i != NONE; i = bodies_[i].next)
                if (bodies_[i].content == content && bodies_[i].known) visit(&bodies_[i]);
        }
    }

    // Finds a text's place in the table's list of them. False: it is not in it, and the list is full.
    bool has_place(Names::Item &item, const std::vector<std::string> &list, size_t limit) const {
        if (item.listed == calls_) return true;
        item.place = static_cast<uint32_t>(list.size());
        return item.place < limit;
    }
    void enlist(Names::Item &item, std::vector<std::string> &list) const {
        if (item.listed == calls_) return;
        item.listed = calls_;
        list.push_back(item.text);
    }
    template <typename T> static void append(std::string &to, const T &record) {
        to.append(reinterpret_cast<const char *>(&record), sizeof record);
    }

    // Write a body with its live holders; false where it has none or the table cannot carry it.
    template <typename IsLive>
    bool write(const Body &body, double now_s, const IsLive &is_live, FoundColumns &out) {
        Names::Item &codec = codecs_[body.codec];
        if (!carries(body.tokens, body.base_position, body.nbytes, body.provenance) ||
            !has_place(codec, out.codecs, FOUND_CODECS_MAX))
            return false;
        FoundBody record = {};
        for (const Entry *e = &body.first; record.holders < FOUND_HOLDERS_MAX; e = &more_[e->next]) {
            Names::Item &who = holders_[e->holder];
            if (!e->gone && e->expires_s > now_s && e->tier <= TIER_MAX && live(e->holder, is_live) &&
                has_place(who, out.names, FOUND_MEMBERS_MAX)) {
                if (who.listed != calls_) out.incarnations.push_back(who.number);
                enlist(who, out.names);
                append(out.holders, FoundHolder{static_cast<uint16_t>(who.place), e->tier});
                ++record.holders;
            }
            if (e->next == NONE) break;
        }
        if (!record.holders) return false;
        enlist(codec, out.codecs);
        std::memcpy(record.exact, &body.exact, KEY_BYTES);
        record.tokens = static_cast<uint32_t>(body.tokens);
        record.base_position = static_cast<uint32_t>(body.base_position);
        record.nbytes = static_cast<uint64_t>(body.nbytes);
        record.provenance = body.provenance;
        record.codec = static_cast<uint8_t>(codec.place);
        append(out.bodies, record);
        return true;
    }

    template <typename IsLive> bool live(uint32_t id, const IsLive &is_live) {
        Names::Item &who = holders_[id];
        if (who.asked != calls_) {
            who.live = is_live(id, who.text, who.number);
            who.asked = calls_;
        }
        return who.live;
    }

    // The body's record with the entry in it; NONE where it does not count: an old one, or no room.
    uint32_t put(const Key &content, const Key &exact, Entry said, bool drop_held) {
        size_t siblings = 0;
        for (uint32_t i = buckets_.head(content.hash()); i != NONE; i = bodies_[i].next) {
            if (!(bodies_[i].content == content)) continue;
            if (bodies_[i].exact == exact) return say(bodies_[i], said) ? i : NONE;
            ++siblings;
        }
        if (siblings >= bodies_max_) {
            if (!make_room(content, drop_held)) return NONE;
            --siblings;
        }
        while (buckets_.size() <= count_)
            buckets_.grow(bodies_, [](const Body &body) { return body.content.hash(); });
        const uint32_t index = bodies_.take();
        Body &body = bodies_[index];
        body = Body{};
        body.content = content;
        body.exact = exact;
        body.first = said;
        body.next = NONE;
        body.used = true;
        holders_.retain(said.holder);
        uint32_t *end = &buckets_.head(content.hash());
        while (*end != NONE) end = &bodies_[*end].next;
        *end = index;
        ++count_;
        keys_ += siblings == 0;
        return index;
    }

    bool say(Body &body, const Entry &said) {
        Entry *e = &body.first;
        for (; e->holder != said.holder; e = &more_[e->next]) {
            if (e->next == NONE) {
                const uint32_t fresh = more_.take();
                more_[fresh] = said;
                e->next = fresh;
                holders_.retain(said.holder);
                return true;
            }
        }
        if (said.seq <= e->seq) return false;
        const uint32_t next = e->next;
        *e = said;
        e->next = next;
        return true;
    }

    // Forget the body heard of longest ago: one that nobody holds, or if need be one that is held.
    bool make_room(const Key &content, bool drop_held) {
        uint32_t oldest = NONE;
        bool oldest_held = false;
        double oldest_s = 0;
        for (uint32_t i = buckets_.head(content.hash()); i != NONE; i = bodies_[i].next) {
            if (!(bodies_[i].content == content)) continue;
            bool held = false;
            double last_s = 0;
            for (const Entry *e = &bodies_[i].first;; e = &more_[e->next]) {
                if (!e->gone) {
                    last_s = held ? std::max(last_s, e->expires_s) : e->expires_s;
                    held = true;
                }
                if (e->next == NONE) break;
            }
            if (oldest == NONE || held < oldest_held || (held == oldest_held && last_s < oldest_s)) {
                oldest = i;
                oldest_held = held;
                oldest_s = last_s;
            }
        }
        if (oldest_held && !drop_held) return false;
        while (drop_first(bodies_[oldest])) {
        }
        unhook(oldest);
        return true;
    }

    // Drop the first entry; false where it was the only one, and the body is to be unhooked.
    bool drop_first(Body &body) {
        holders_.drop(body.first.holder);
        const uint32_t next = body.first.next;
        if (next == NONE) return false;
        body.first = more_[next];
        more_.give_back(next);
        return true;
    }

    // Take a body without entries out of its chain.
    void unhook(uint32_t index) {
        const Key content = bodies_[index].content;
        size_t siblings = 0;
        uint32_t *link = &buckets_.head(content.hash());
        while (*link != NONE) {
            Body &body = bodies_[*link];
            if (*link == index) {
                *link = body.next;
                continue;
            }
            siblings += body.content == content;
            link = &body.next;
        }
        if (bodies_[index].known) codecs_.drop(bodies_[index].codec);
        bodies_.give_back(index);
        --count_;
        keys_ -= siblings == 0;
    }

    const double ttl_s_, tombstone_s_;
    const size_t bodies_max_;
    mutable std::mutex mutex_;
    Pool<Body> bodies_;
    Pool<Entry> more_;
    Buckets buckets_;
    Names holders_, codecs_;
    size_t count_ = 0, keys_ = 0;
    uint32_t sweep_ = 0;
    uint64_t calls_ = 0;
};

}  // namespace p2pcache

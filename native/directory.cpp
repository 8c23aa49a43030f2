// One node's shard of the directory, compact. The Python twin is `PlainDirectory` of
// p2pcache/core/directory_twin.py, which says what it all means; both answer alike.
//
// A body is one record of 104 bytes, with what its first holder said of it inside; further holders are
// chained behind it. Bodies hang in hash chains by content key, in the order in which they were first
// heard of. Names of holders and of codecs are stored once and counted.

#include <algorithm>
#include <cmath>
#include <string>
#include <unordered_map>

#include "found.h"
#include "table.h"

namespace nb = nanobind;
using namespace p2pcache;

namespace {

constexpr size_t TEXT_BYTES_MAX = 1024;

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
        nb::str text;
        int64_t number;
        size_t uses = 0;
        uint64_t asked = 0;  // the lookup in which `live` was found out
        bool live = false;
        uint64_t listed = 0;  // the lookup in whose table it stands, and where
        uint32_t place = 0;
    };

    uint32_t add(nb::str text, int64_t number) {
        const auto [it, fresh] = ids_.try_emplace(id_of(text, number), NONE);
        if (fresh) {
            if (free_.empty()) {
                it->second = static_cast<uint32_t>(items_.size());
                items_.push_back({std::move(text), number});
            } else {
                it->second = free_.back();
                free_.pop_back();
                items_[it->second] = {std::move(text), number};
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
        item.text = nb::str("");
    }
    Item &operator[](uint32_t id) { return items_[id]; }

private:
    static std::string id_of(const nb::str &text, int64_t number) {
        Py_ssize_t size = 0;
        const char *utf8 = PyUnicode_AsUTF8AndSize(text.ptr(), &size);
        if (!utf8) nb::raise_python_error();
        if (static_cast<size_t>(size) > TEXT_BYTES_MAX) throw nb::value_error("a name is at most 1024 bytes");
        std::string id(reinterpret_cast<const char *>(&number), sizeof number);
        return id.append(utf8, static_cast<size_t>(size));
    }
    std::unordered_map<std::string, uint32_t> ids_;
    std::vector<Item> items_;
    std::vector<uint32_t> free_;
};

int64_t integer(nb::handle value) {
    const long long got = PyLong_AsLongLong(value.ptr());
    if (got == -1 && PyErr_Occurred()) nb::raise_python_error();
    return got;
}

nb::object field(nb::handle of, Py_ssize_t index) {
    PyObject *got = PySequence_GetItem(of.ptr(), index);
    if (!got) nb::raise_python_error();
    return nb::steal(got);
}

uint8_t small(nb::handle value) {
    const int64_t got = integer(value);
    if (got < 0 || got > 255) throw nb::value_error("a provenance is a small number");
    return static_cast<uint8_t>(got);
}

class Directory {
public:
    Directory(double ttl_s, double tombstone_s, size_t bodies_max)
        : ttl_s_(ttl_s), tombstone_s_(tombstone_s), bodies_max_(bodies_max) {
        if (bodies_max < 1) throw nb::value_error("bodies_max must be above 0");
    }

    size_t publish(nb::str name, int64_t incarnation, int tier, nb::iterable bodies, double now_s) {
        Use holder(*this, name, incarnation);
        check_time(now_s);
        if (tier < 0 || tier > 255) throw nb::value_error("a tier is a small number");
        size_t accepted = 0;
        for (nb::handle item : bodies) {
            // All of Python is over before the first change, so a bad body changes nothing.
            const nb::object info = field(item, 0);
            const Entry said = {integer(field(item, 1)), now_s + ttl_s_, holder.id, NONE, (uint8_t) tier, false};
            Body fresh = {};
            fresh.content = key_of(info.attr("content"));
            fresh.exact = key_of(info.attr("exact"));
            fresh.tokens = integer(info.attr("tokens"));
            fresh.nbytes = integer(info.attr("nbytes"));
            fresh.base_position = integer(info.attr("base_position"));
            fresh.provenance = small(info.attr("provenance"));
            const nb::object codec = info.attr("codec");
            if (!PyUnicode_Check(codec.ptr())) throw nb::value_error("a codec is named by text");
            fresh.codec = codecs_.add(nb::borrow<nb::str>(codec), 0);
            const uint32_t index = put(fresh.content, fresh.exact, said, true);
            if (index == NONE) {
                codecs_.drop(fresh.codec);
                continue;
            }
            Body &body = bodies_[index];
            if (body.known) codecs_.drop(body.codec);
            body.tokens = fresh.tokens;
            body.nbytes = fresh.nbytes;
            body.base_position = fresh.base_position;
            body.provenance = fresh.provenance;
            body.codec = fresh.codec;
            body.known = true;
            ++accepted;
        }
        return accepted;
    }

    size_t withdraw(nb::str name, int64_t incarnation, nb::iterable bodies, double now_s) {
        Use holder(*this, name, incarnation);
        check_time(now_s);
        size_t accepted = 0;
        for (nb::handle item : bodies) {
            const Key content = key_of(field(item, 0)), exact = key_of(field(item, 1));
            const int64_t seq = integer(field(item, 2));
            const Entry said = {seq, now_s + tombstone_s_, holder.id, NONE, 0, true};
            // Even where nothing is known to withdraw: the publish may still be on its way here.
            accepted += put(content, exact, said, false) != NONE;
        }
        return accepted;
    }

    // What is known of keys, joined, as the columns of `p2pcache.core.found.Table`; `is_live` is asked once a
    // holder and call. What a table has no room for is left out.
    nb::tuple table(nb::bytes contents, double now_s, nb::callable is_live) {
        check_time(now_s);
        if (contents.size() % KEY_BYTES) throw nb::value_error("a key is 16 bytes");
        Reading reading(*this);
        Columns out{++calls_};
        const char *raw = contents.c_str();
        for (size_t left = contents.size() / KEY_BYTES; left; --left, raw += KEY_BYTES) {
            Key content;
            std::memcpy(&content, raw, KEY_BYTES);
            size_t count = 0;
            for (uint32_t i = buckets_.head(content.hash()); i != NONE && count < FOUND_BODIES_MAX;
                 i = bodies_[i].next)
                if (bodies_[i].content == content && bodies_[i].known)
                    count += write(bodies_[i], now_s, is_live, out);
            out.counts.push_back(static_cast<char>(count));
        }
        return nb::make_tuple(out.names, as_bytes(out.incarnations), out.codecs, as_bytes(out.counts),
                              as_bytes(out.bodies), as_bytes(out.holders));
    }

    // Looks at `batch_max` records at most and goes on from there the next time.
    size_t expire(double now_s, size_t batch_max) {
        check_time(now_s);
        check_idle();
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

    size_t keys() const { return keys_; }
    size_t nbytes() const { return bodies_.nbytes() + more_.nbytes() + buckets_.nbytes(); }

private:
    // A holder's number, kept for as long as a message of it is being read.
    struct Use {
        Use(Directory &d, nb::str name, int64_t incarnation) : d(d) {
            d.check_idle();
            id = d.holders_.add(std::move(name), incarnation);
        }
        ~Use() { d.holders_.drop(id); }
        Directory &d;
        uint32_t id;
    };
    // `is_live` is Python: it must not change under us what we are reading.
    struct Reading {
        explicit Reading(Directory &d) : d(d) { ++d.reading_; }
        ~Reading() { --d.reading_; }
        Directory &d;
    };
    void check_idle() const {
        if (reading_) throw std::runtime_error("the directory cannot change while a lookup runs");
    }
    static void check_time(double now_s) {
        if (!std::isfinite(now_s)) throw nb::value_error("the time must be finite");
    }

    // A table that is being written.
    struct Columns {
        uint64_t call;
        nb::list names = {}, codecs = {};
        std::string incarnations = {}, counts = {}, bodies = {}, holders = {};
    };
    static nb::bytes as_bytes(const std::string &text) { return nb::bytes(text.data(), text.size()); }
    template <typename T> static void append(std::string &to, const T &record) {
        to.append(reinterpret_cast<const char *>(&record), sizeof record);
    }

    // Finds a text's place in the table's list of them. False: it is not in it, and the list is full.
    static bool has_place(Names::Item &item, uint64_t call, nb::list &list, size_t limit) {
        if (item.listed == call) return true;
        item.place = static_cast<uint32_t>(nb::len(list));
        return item.place < limit;
    }
    static void enlist(Names::Item &item, uint64_t call, nb::list &list) {
        if (item.listed == call) return;
        item.listed = call;
        list.append(item.text);
    }

    // Write a body with its live holders; false where it has none or the table cannot carry it.
    bool write(const Body &body, double now_s, const nb::callable &is_live, Columns &out) {
        Names::Item &codec = codecs_[body.codec];
        if (!carries(body.tokens, body.base_position, body.nbytes, body.provenance) ||
            !has_place(codec, out.call, out.codecs, FOUND_CODECS_MAX))
            return false;
        FoundBody record = {};
        for (const Entry *e = &body.first; record.holders < FOUND_HOLDERS_MAX; e = &more_[e->next]) {
            Names::Item &who = holders_[e->holder];
            if (!e->gone && e->expires_s > now_s && e->tier <= TIER_MAX && live(e->holder, out.call, is_live) &&
                has_place(who, out.call, out.names, FOUND_MEMBERS_MAX)) {
                if (who.listed != out.call) append(out.incarnations, who.number);
                enlist(who, out.call, out.names);
                append(out.holders, FoundHolder{static_cast<uint16_t>(who.place), e->tier});
                ++record.holders;
            }
            if (e->next == NONE) break;
        }
        if (!record.holders) return false;
        enlist(codec, out.call, out.codecs);
        std::memcpy(record.exact, &body.exact, KEY_BYTES);
        record.tokens = static_cast<uint32_t>(body.tokens);
        record.base_position = static_cast<uint32_t>(body.base_position);
        record.nbytes = static_cast<uint64_t>(body.nbytes);
        record.provenance = body.provenance;
        record.codec = static_cast<uint8_t>(codec.place);
        append(out.bodies, record);
        return true;
    }

    bool live(uint32_t id, uint64_t call, const nb::callable &is_live) {
        if (holders_[id].asked != call) {
            const int answer = PyObject_IsTrue(is_live(holders_[id].text, holders_[id].number).ptr());
            if (answer < 0) nb::raise_python_error();
            holders_[id].live = answer;
            holders_[id].asked = call;
        }
        return holders_[id].live;
    }

    // The body's record with the entry in it; NONE where it does not count: an old one, or no room.
    uint32_t put(const Key &content, const Key &exact, Entry said, bool drop_held) {
        check_idle();
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
    Pool<Body> bodies_;
    Pool<Entry> more_;
    Buckets buckets_;
    Names holders_, codecs_;
    size_t count_ = 0, keys_ = 0;
    uint32_t sweep_ = 0;
    uint64_t calls_ = 0;
    int reading_ = 0;
};

}  // namespace

void bind_directory(nb::module_ &m) {
    nb::class_<Directory>(m, "Directory", "The table behind `p2pcache.core.directory.Directory`.")
        .def(nb::init<double, double, size_t>(), nb::arg("ttl_s"), nb::arg("tombstone_s"), nb::arg("bodies_max"))
        .def("publish", &Directory::publish, nb::arg("name"), nb::arg("incarnation"), nb::arg("tier"),
             nb::arg("bodies"), nb::arg("now_s"))
        .def("withdraw", &Directory::withdraw, nb::arg("name"), nb::arg("incarnation"), nb::arg("bodies"),
             nb::arg("now_s"))
        .def("table", &Directory::table, nb::arg("contents"), nb::arg("now_s"), nb::arg("is_live"))
        .def("expire", &Directory::expire, nb::arg("now_s"), nb::arg("batch_max"))
        .def("__len__", &Directory::keys)
        .def_prop_ro("nbytes", &Directory::nbytes, "Bytes of its tables; names are not counted.");
}

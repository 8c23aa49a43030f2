// Plans a prompt of which one body at most is known of each chunk, over records: what owners said and what is at home
// goes in, the packed reply of a lookup comes out. `p2pcache.core.planner.plan` is the definition: it does the same
// chunk by chunk, and is compared with this in the tests, to the bit.

#include <algorithm>
#include <cstring>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include "buffer.h"
#include "found.h"

namespace nb = nanobind;
using namespace p2pcache;

namespace {

constexpr uint8_t NVME = 2, NONE_CHOSEN = 255;
constexpr size_t ASK_BYTES = 32;
constexpr int32_t HERE = -1;  // a member's line where that is this node; below it: out of reach
enum Outcome { IN_TIME, LATE, OUT_OF_REACH };  // what becomes of a body

// The records of p2pcache/core/records.py.
struct __attribute__((packed)) AnswerRecord {
    uint8_t match, source;
    uint16_t peer;
    uint8_t miss, chosen, found;
    double cost_s;
};
struct __attribute__((packed)) WantRecord {
    uint8_t content[16], exact[16];
    uint32_t tokens;
    uint64_t nbytes;
    uint8_t provenance;
    uint32_t base_position;
    uint16_t codec, holders;
};
struct __attribute__((packed)) HolderRecord {
    uint16_t node;
    uint64_t incarnation;
    uint8_t tier;
};
static_assert(sizeof(AnswerRecord) == 15 && sizeof(WantRecord) == 53 && sizeof(HolderRecord) == 11, "the records");

// The codes of enums in records, in the order of `plans._CODES`.
struct Codes {
    uint8_t exact, content, none, local, peer, recompute, deadline, unreachable, exact_only, cheaper;
};

struct Member {
    int32_t line, rank;  // rank: its name's place among all, for ties
};
struct Line {
    double latency_s, pace, caution, taken_s;
    uint64_t shared;  // it is one of those that share this node's inlet

    double by_s(double nbytes) const { return latency_s + taken_s + nbytes * pace; }
};

template <typename T> std::vector<T> rows(nb::handle object) {
    const Buffer buffer(object, false);
    if (buffer.nbytes % sizeof(T)) throw std::invalid_argument("not whole records");
    std::vector<T> out(buffer.nbytes / sizeof(T));
    if (!out.empty()) std::memcpy(out.data(), buffer.data, buffer.nbytes);
    return out;
}

template <typename T> nb::bytes packed(const std::vector<T> &records) {
    return nb::bytes(records.data(), records.size() * sizeof(T));
}

class Singles {
public:
    // asked: content and exact key of each chunk, joined. parts: (places, table) each: the chunks that a table is of,
    // int64 `[keys]`, and the six columns of `found.Table`, whose records have been checked.
    Singles(nb::bytes asked, nb::list parts) : asked_(asked.c_str(), asked.size()), chunks_(asked.size() / ASK_BYTES) {
        std::vector<Row> row(chunks_);
        std::vector<std::vector<FoundBody>> bodies;
        std::vector<std::vector<FoundHolder>> holders;
        for (nb::handle part : parts) {
            const auto places = rows<int64_t>(part[0]);
            const nb::object table = part[1];
            const Numbers to = numbers(table);
            const auto counts = rows<uint8_t>(table[3]);
            bodies.push_back(rows<FoundBody>(table[4]));
            holders.push_back(rows<FoundHolder>(table[5]));
            if (counts.size() != places.size()) throw std::invalid_argument("not a count a place");
            size_t at = 0, held = 0;
            for (size_t i = 0; i < places.size(); ++i) {
                if (!counts[i]) continue;
                if (counts[i] > 1 || at >= bodies.back().size()) throw std::invalid_argument("not one body a key");
                FoundBody &body = bodies.back()[at++];
                if (held + body.holders > holders.back().size() || !body.holders || body.codec >= to.codecs.size())
                    throw std::invalid_argument("a body's record is out of range");
                const auto place = static_cast<size_t>(places[i]);
                if (place >= chunks_ || row[place].body) throw std::invalid_argument("a chunk that is none, or known twice");
                for (size_t h = held; h < held + body.holders; ++h) {
                    FoundHolder &holder = holders.back()[h];
                    if (holder.member >= to.members.size()) throw std::invalid_argument("a holder is none of the members");
                    holder.member = to.members[holder.member];
                }
                row[place] = {&body, holders.back().data() + held, to.codecs[body.codec]};
                held += body.holders;
            }
        }
        for (size_t i = 0; i < chunks_; ++i) {
            if (!row[i].body) continue;
            chunk_.push_back(i);
            bodies_.push_back(*row[i].body);
            codec_.push_back(row[i].codec);
            holders_.insert(holders_.end(), row[i].holders, row[i].holders + row[i].body->holders);
        }
    }

    // (name, incarnation) of all who hold anything.
    nb::list members() const {
        nb::list out;
        for (const auto &[name, incarnation] : members_) out.append(nb::make_tuple(name, incarnation));
        return out;
    }
    // Tokens of what is known of each chunk, 0 where nothing is: int64 `[chunks]` as bytes.
    nb::bytes tokens() const {
        std::vector<int64_t> out(chunks_);
        for (size_t i = 0; i < chunk_.size(); ++i) out[chunk_[i]] = bodies_[i].tokens;
        return packed(out);
    }

    // See `plans.plan_singles`, which is alone to call this.
    nb::tuple plan(nb::handle member_rows, nb::handle line_rows, bool has_inlet, double nvme_latency_s,
                   double nvme_pace, double local_s, double within_s, bool content_reuse, nb::handle absent_codes,
                   nb::object compute_seconds, double patience, double patience_min_s, nb::bytes code_bytes) {
        Codes code;
        if (code_bytes.size() != sizeof code) throw std::invalid_argument("other codes than these");
        std::memcpy(&code, code_bytes.c_str(), sizeof code);
        const auto members = rows<Member>(member_rows);
        auto lines = rows<Line>(line_rows);
        const auto absent = rows<uint8_t>(absent_codes);
        std::vector<double> compute_s;
        if (!compute_seconds.is_none()) compute_s = rows<double>(compute_seconds);
        if (members.size() != members_.size() || absent.size() != chunks_ ||
            (!compute_seconds.is_none() && compute_s.size() != chunks_))
            throw std::invalid_argument("a column is not as long as the others");
        if (has_inlet && lines.empty()) throw std::invalid_argument("there is no inlet among the lines");
        for (const Member &m : members)
            if (m.line >= static_cast<int32_t>(lines.size())) throw std::invalid_argument("a member without a line");

        // 1. Each body to the line that would have it first, in the prompt's order.
        std::vector<AnswerRecord> answers(chunks_);
        std::vector<bool> is_coming(chunks_);
        for (size_t i = 0; i < chunks_; ++i)
            answers[i] = {code.none, code.recompute, 0, absent[i], NONE_CHOSEN, 0, 0};
        Line *inlet = has_inlet ? &lines.back() : nullptr;
        FoundHolder *holder = holders_.data();
        for (size_t i = 0; i < chunk_.size(); holder += bodies_[i].holders, ++i) {
            AnswerRecord &answer = answers[chunk_[i]];
            answer.found = 1;
            const bool exact = !std::memcmp(bodies_[i].exact, asked_.data() + chunk_[i] * ASK_BYTES + 16, 16);
            if (!exact && !content_reuse) {
                answer.miss = code.exact_only;
                continue;
            }
            double cost_s = 0;
            const Outcome outcome = choose(bodies_[i], holder, members, lines, inlet, nvme_latency_s, nvme_pace,
                                           local_s, within_s, cost_s);
            if (outcome != IN_TIME) {
                answer.miss = outcome == LATE ? code.deadline : code.unreachable;
                continue;
            }
            const bool here = members[holder->member].line == HERE;
            answer = {exact ? code.exact : code.content, here ? code.local : code.peer,
                      static_cast<uint16_t>(holder->member + 1), 0, 0, 1, cost_s};
            is_coming[chunk_[i]] = !here;
        }
        // 2. Of what would come from peers as much as is worth waiting for.
        std::vector<size_t> coming;
        for (const size_t i : chunk_)
            if (is_coming[i]) coming.push_back(i);
        double fetch_s = 0;
        nb::object patience_s = nb::none();
        if (!coming.empty() && compute_seconds.is_none()) {
            for (const size_t i : coming) fetch_s = std::max(fetch_s, double{answers[i].cost_s});
        } else if (!coming.empty()) {
            std::stable_sort(coming.begin(), coming.end(),
                             [&](size_t a, size_t b) { return answers[a].cost_s < answers[b].cost_s; });
            const size_t worth = worth_waiting(coming, answers, compute_s, fetch_s);
            for (size_t c = worth; c < coming.size(); ++c)
                answers[coming[c]] = {code.none, code.recompute, 0, code.cheaper, NONE_CHOSEN, 1, 0};
            double saved_s = 0;
            for (size_t c = 0; c < worth; ++c) saved_s += compute_s[coming[c]];
            if (worth) patience_s = nb::float_(std::max(patience * saved_s, patience_min_s));
        }
        // 3. The records, and what they add up to.
        std::vector<uint64_t> hits(256 * 2), tokens(256), misses(256);
        size_t known = 0;
        for (size_t i = 0; i < chunks_; ++i) {
            const AnswerRecord &answer = answers[i];
            const bool has = known < chunk_.size() && chunk_[known] == i;
            if (answer.source != code.recompute) {
                ++hits[2 * answer.match + (answer.source == code.peer)];
                tokens[answer.match] += bodies_[known].tokens;
            }
            ++misses[answer.miss];
            known += has;
        }
        nb::list counted;
        for (const uint8_t match : {code.exact, code.content})
            for (const bool peer : {false, true})
                if (const uint64_t n = hits[2 * match + peer])
                    counted.append(nb::make_tuple(match, peer ? code.peer : code.local, n, tokens[match]));
        nb::list missed;
        for (size_t miss = 1; miss < misses.size(); ++miss)
            if (misses[miss]) missed.append(nb::make_tuple(miss, misses[miss]));
        return nb::make_tuple(names(), packed(answers), packed(wants()), packed(held()), fetch_s, patience_s, counted,
                              missed);
    }

private:
    struct Row {
        const FoundBody *body = nullptr;
        const FoundHolder *holders = nullptr;
        uint16_t codec = 0;
    };
    // A table's own numbers as ours.
    struct Numbers {
        std::vector<uint16_t> members, codecs;
    };
    Numbers numbers(const nb::object &table) {
        Numbers to;
        const auto incarnations = rows<int64_t>(table[1]);
        size_t i = 0;
        for (nb::handle name : nb::borrow<nb::iterable>(table[0])) {
            if (i >= incarnations.size()) throw std::invalid_argument("not an incarnation a name");
            const std::pair<std::string, int64_t> who{nb::cast<std::string>(name), incarnations[i++]};
            const auto [it, fresh] = member_at_.try_emplace(who, static_cast<uint16_t>(members_.size()));
            if (fresh) members_.push_back(who);
            to.members.push_back(it->second);
        }
        for (nb::handle codec : nb::borrow<nb::iterable>(table[2])) {
            std::string text = nb::cast<std::string>(codec);
            const auto it = std::find(codecs_.begin(), codecs_.end(), text);
            to.codecs.push_back(static_cast<uint16_t>(it - codecs_.begin()));
            if (it == codecs_.end()) codecs_.push_back(std::move(text));
        }
        if (members_.size() + codecs_.size() >= 0xFFFF) throw std::invalid_argument("more names than have numbers");
        return to;
    }

    // Choose a holder of a body, put it first of its holders, and take up its line.
    static Outcome choose(const FoundBody &body, FoundHolder *holder, const std::vector<Member> &member,
                          std::vector<Line> &line, Line *inlet, double nvme_latency_s, double nvme_pace, double local_s,
                          double within_s, double &cost_s) {
        const double nbytes = static_cast<double>(body.nbytes);
        FoundHolder *const end = holder + body.holders, *best = nullptr;
        Outcome outcome = OUT_OF_REACH;
        for (FoundHolder *h = holder; h < end; ++h) {
            const Member &who = member[h->member];
            if (who.line < HERE) continue;
            double here_s = local_s, late_s = local_s;
            if (who.line != HERE) {
                const Line &way = line[static_cast<size_t>(who.line)];
                here_s = way.by_s(nbytes);
                if (way.shared && inlet) here_s = std::max(here_s, inlet->by_s(nbytes));
                if (h->tier == NVME) here_s += nvme_latency_s + nbytes * nvme_pace;
                late_s = here_s * way.caution;
            }
            outcome = LATE;
            if (!(late_s <= within_s)) continue;
            if (best && (here_s > cost_s || (here_s == cost_s && who.rank >= member[best->member].rank))) continue;
            best = h;
            cost_s = here_s;
        }
        if (!best) return outcome;
        if (const int32_t taken = member[best->member].line; taken != HERE) {
            Line &way = line[static_cast<size_t>(taken)];
            way.taken_s += nbytes * way.pace;
            if (way.shared && inlet) inlet->taken_s += nbytes * inlet->pace;
        }
        // Whoever fetches it asks in this order: the chosen one, then by tier and name.
        std::rotate(holder, best, best + 1);
        std::stable_sort(holder + 1, end, [&](const FoundHolder &a, const FoundHolder &b) {
            return a.tier != b.tier ? a.tier < b.tier : member[a.member].rank < member[b.member].rank;
        });
        return IN_TIME;
    }

    // `planner._worth_waiting`: how many of what is coming to wait for, and the seconds until they are here.
    static size_t worth_waiting(const std::vector<size_t> &coming, const std::vector<AnswerRecord> &answers,
                                const std::vector<double> &compute_s, double &wait_s) {
        double left_s = 0;
        for (const size_t i : coming) left_s += compute_s[i];
        double best_s = left_s;
        size_t best = 0;
        for (size_t c = 0; c < coming.size(); ++c) {
            left_s -= compute_s[coming[c]];
            const double here_s = answers[coming[c]].cost_s;
            if (here_s + left_s > best_s) continue;
            best = c + 1;
            best_s = here_s + left_s;
            wait_s = here_s;
        }
        return best;
    }

    nb::list names() const {
        nb::list out;
        out.append("");
        for (const auto &member : members_) out.append(member.first);
        for (const std::string &codec : codecs_) out.append(codec);
        return out;
    }
    std::vector<WantRecord> wants() const {
        std::vector<WantRecord> out(chunk_.size());
        for (size_t i = 0; i < out.size(); ++i) {
            const FoundBody &b = bodies_[i];
            WantRecord &want = out[i];
            std::memcpy(want.content, asked_.data() + chunk_[i] * ASK_BYTES, 16);
            std::memcpy(want.exact, b.exact, 16);
            want.tokens = b.tokens;
            want.nbytes = b.nbytes;
            want.provenance = b.provenance;
            want.base_position = b.base_position;
            want.codec = static_cast<uint16_t>(1 + members_.size() + codec_[i]);
            want.holders = b.holders;
        }
        return out;
    }
    std::vector<HolderRecord> held() const {
        std::vector<HolderRecord> out;
        out.reserve(holders_.size());
        for (const FoundHolder &h : holders_)
            out.push_back({static_cast<uint16_t>(h.member + 1), static_cast<uint64_t>(members_[h.member].second), h.tier});
        return out;
    }

    const std::string asked_;
    const size_t chunks_;
    std::vector<std::pair<std::string, int64_t>> members_;
    std::map<std::pair<std::string, int64_t>, uint16_t> member_at_;
    std::vector<std::string> codecs_;
    // Of what is known, in the prompt's order: the chunk it is of, the body, its codec's number, and its holders.
    std::vector<size_t> chunk_;
    std::vector<FoundBody> bodies_;
    std::vector<uint16_t> codec_;
    std::vector<FoundHolder> holders_;
};

}  // namespace

void bind_plans(nb::module_ &m) {
    nb::class_<Singles>(m, "Singles", "What is known of a prompt's chunks, one body at most of each; see plans.py.")
        .def(nb::init<nb::bytes, nb::list>(), nb::arg("asked"), nb::arg("parts"))
        .def_prop_ro("members", &Singles::members)
        .def_prop_ro("tokens", &Singles::tokens)
        .def("plan", &Singles::plan, nb::arg("members"), nb::arg("lines"), nb::arg("has_inlet"),
             nb::arg("nvme_latency_s"), nb::arg("nvme_pace"), nb::arg("local_s"), nb::arg("within_s"),
             nb::arg("content_reuse"), nb::arg("absent"), nb::arg("compute_s").none(), nb::arg("patience"),
             nb::arg("patience_min_s"), nb::arg("codes"));
}

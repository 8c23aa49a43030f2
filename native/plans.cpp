// Gives each body of a prompt to the line that would have it first, in the prompt's order: what
// `p2pcache.core.planner.plan` does chunk by chunk, and is compared with in the tests, to the bit.

#include <algorithm>
#include <stdexcept>

#include <nanobind/nanobind.h>

#include "buffer.h"
#include "found.h"

namespace nb = nanobind;
using namespace p2pcache;

namespace {

constexpr uint8_t NVME = 2;
constexpr int32_t HERE = -1;  // a member's line where that is this node; below it: out of reach
constexpr int32_t IN_TIME = 0, LATE = 1, OUT_OF_REACH = 2;  // what becomes of a body

struct Member {
    int32_t line, rank;  // rank: its name's place among all, for ties
};
struct Line {
    double latency_s, pace, caution, taken_s;
    uint64_t shared;  // it is one of those that share this node's inlet

    double by_s(double nbytes) const { return latency_s + taken_s + nbytes * pace; }
};

template <typename T> T *items(const Buffer &buffer, size_t count) {
    if (buffer.nbytes != count * sizeof(T))
        throw std::invalid_argument("a column is not as long as the others");
    return reinterpret_cast<T *>(buffer.data);
}
template <typename T> size_t count_of(const Buffer &buffer) { return buffer.nbytes / sizeof(T); }

void assign_lines(nb::handle body_rows, nb::handle holder_rows, nb::handle member_rows, nb::handle line_rows,
                  bool has_inlet, nb::handle wanted_rows, double nvme_latency_s, double nvme_pace, double local_s,
                  double within_s, nb::handle outcome_rows, nb::handle cost_rows) {
    const Buffer bodies(body_rows, false), members(member_rows, false), wanted(wanted_rows, false);
    const Buffer holders(holder_rows, true), lines(line_rows, true), outcomes(outcome_rows, true),
        costs(cost_rows, true);
    const size_t count = count_of<FoundBody>(bodies), members_count = count_of<Member>(members),
                 lines_count = count_of<Line>(lines);
    const auto *body = items<const FoundBody>(bodies, count);
    const auto *member = items<const Member>(members, members_count);
    const auto *want = items<const uint8_t>(wanted, count);
    auto *line = items<Line>(lines, lines_count);
    auto *holder = items<FoundHolder>(holders, count_of<FoundHolder>(holders));
    auto *outcome = items<int32_t>(outcomes, count);
    auto *cost = items<double>(costs, count);
    if (has_inlet && !lines_count) throw std::invalid_argument("there is no inlet among the lines");
    Line *inlet = has_inlet ? line + lines_count - 1 : nullptr;  // it is the last one
    size_t left = count_of<FoundHolder>(holders);
    for (size_t i = 0; i < count; holder += body[i].holders, ++i) {
        if (body[i].holders > left) throw std::invalid_argument("there are more holders than bodies speak of");
        left -= body[i].holders;
        outcome[i] = OUT_OF_REACH;
        cost[i] = 0;
        if (!want[i]) continue;
        const double nbytes = static_cast<double>(body[i].nbytes);
        const FoundHolder *best = nullptr;
        double best_s = 0;
        for (FoundHolder *h = holder; h < holder + body[i].holders; ++h) {
            if (h->member >= members_count || member[h->member].line >= static_cast<int32_t>(lines_count))
                throw std::invalid_argument("a holder is none of the members");
            const Member &who = member[h->member];
            if (who.line < HERE) continue;
            double here_s = local_s, late_s = local_s;
            if (who.line != HERE) {
                const Line &way = line[who.line];
                here_s = way.by_s(nbytes);
                if (way.shared && inlet) here_s = std::max(here_s, inlet->by_s(nbytes));
                if (h->tier == NVME) here_s += nvme_latency_s + nbytes * nvme_pace;
                late_s = here_s * way.caution;
            }
            if (outcome[i] == OUT_OF_REACH) outcome[i] = LATE;
            if (!(late_s <= within_s)) continue;
            if (best && (here_s > best_s || (here_s == best_s && who.rank >= member[best->member].rank)))
                continue;
            best = h;
            best_s = here_s;
        }
        if (!best) continue;
        outcome[i] = IN_TIME;
        cost[i] = best_s;
        const int32_t taken = member[best->member].line;
        if (taken != HERE) {
            line[taken].taken_s += nbytes * line[taken].pace;
            if (line[taken].shared && inlet) inlet->taken_s += nbytes * inlet->pace;
        }
        // Whoever fetches it asks in this order: the chosen one, then by tier and name.
        const size_t at = static_cast<size_t>(best - holder);
        std::rotate(holder, holder + at, holder + at + 1);
        std::stable_sort(holder + 1, holder + body[i].holders, [&](const FoundHolder &a, const FoundHolder &b) {
            return a.tier != b.tier ? a.tier < b.tier : member[a.member].rank < member[b.member].rank;
        });
    }
}

}  // namespace

void bind_plans(nb::module_ &m) {
    m.def("assign_lines", &assign_lines, nb::arg("bodies"), nb::arg("holders"), nb::arg("members"),
          nb::arg("lines"), nb::arg("has_inlet"), nb::arg("wanted"), nb::arg("nvme_latency_s"),
          nb::arg("nvme_pace"), nb::arg("local_s"), nb::arg("within_s"), nb::arg("outcomes"), nb::arg("costs"),
          "Choose a holder for each body, put it first of its holders, and say what became of each.");
}

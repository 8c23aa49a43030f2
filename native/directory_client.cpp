// Asks peers' directories, on a thread of its own that never needs the GIL: a batch of requests goes out at once, and
// whoever waits for it is woken once, when each of them has been answered, has failed, or is late.
//
// One connection a peer, opened when it is first asked. What waits for a peer that does not read is bounded, and
// is dropped when nobody waits for it any more.

#include <atomic>
#include <cmath>
#include <deque>
#include <map>
#include <memory>
#include <set>
#include <unordered_map>

#include <arpa/inet.h>

#include "directory_py.h"
#include "directory_wire.h"
#include "stream.h"

namespace nb = nanobind;
using namespace p2pcache;

namespace {

constexpr size_t BATCHES_MAX = 1024, WAITING_BYTES_MAX = 4u << 20;

// Where a peer's directory is: its address, and what it wants to be shown first.
struct Target {
    sockaddr_storage address = {};
    socklen_t length = 0;
    std::string pass;

    // `1.2.3.4:5` or `[::1]:5`; false where it is neither.
    bool parse(const std::string &text) {
        const size_t colon = text.rfind(':');
        if (colon == std::string::npos || colon + 1 == text.size() || text.size() > colon + 6) return false;
        unsigned port = 0;
        for (size_t i = colon + 1; i < text.size(); ++i) {
            if (text[i] < '0' || text[i] > '9') return false;
            port = 10 * port + static_cast<unsigned>(text[i] - '0');
        }
        if (!port || port > 0xFFFF) return false;
        std::string host = text.substr(0, colon);
        if (host.size() > 2 && host.front() == '[' && host.back() == ']') {
            auto *v6 = reinterpret_cast<sockaddr_in6 *>(&address);
            v6->sin6_family = AF_INET6;
            v6->sin6_port = htons(static_cast<uint16_t>(port));
            length = sizeof *v6;
            return inet_pton(AF_INET6, host.substr(1, host.size() - 2).c_str(), &v6->sin6_addr) == 1;
        }
        auto *v4 = reinterpret_cast<sockaddr_in *>(&address);
        v4->sin_family = AF_INET;
        v4->sin_port = htons(static_cast<uint16_t>(port));
        length = sizeof *v4;
        return inet_pton(AF_INET, host.c_str(), &v4->sin_addr) == 1;
    }
};

// What became of one request: a table, or the code and the text of an error.
struct Outcome {
    bool done = false;
    FoundColumns found;
    bool unknown = false;
    std::string code, text;
};

struct Ask {
    std::string where;  // address and pass: which connection
    Target target;
    int64_t incarnation = 0;
    size_t keys = 0;
    int64_t id = 0;
    std::string request;
};

struct Batch {
    uint64_t number = 0;
    double by_s = 0;
    std::vector<Ask> asks;
    std::vector<Outcome> outcomes;
    size_t left = 0;
    bool finished = false;
};

class Client {
public:
    Client(std::string name, int64_t incarnation) : me_{std::move(name), incarnation, {}} {
        poll_.add(bell_.fd(), EPOLLIN);
        worker_ = std::make_unique<Worker>([this] { run(); });
    }
    ~Client() { stop(); }

    int fd() const { return done_bell_.fd(); }
    void follow(nb::bytes view_id) { me_.view_id = {view_id.c_str(), view_id.size()}; }

    // asks: (address, pass, incarnation, contents) each. Returns the number under which `take` tells of it, or 0
    // where too much is under way.
    uint64_t ask(nb::list asks, double by_s) {
        auto batch = std::make_shared<Batch>();
        batch->by_s = by_s;
        for (nb::handle item : asks) {
            const auto [address, pass, incarnation, contents] =
                nb::cast<std::tuple<std::string, nb::bytes, int64_t, nb::bytes>>(item);
            Ask made;
            Outcome outcome;
            made.where.assign(pass.c_str(), pass.size()).append(address);
            made.target.pass.assign(pass.c_str(), pass.size());
            made.incarnation = incarnation;
            made.keys = contents.size() / KEY_BYTES;
            made.id = ++ids_;
            if (pass.size() != PASS_BYTES || !made.target.parse(address)) {
                outcome.done = true;
                outcome.code = "lost";
                outcome.text = "cannot be asked at " + address;
            }
            made.request = write_request(made.id, incarnation, me_, {contents.c_str(), contents.size()});
            batch->left += !outcome.done;
            batch->asks.push_back(std::move(made));
            batch->outcomes.push_back(std::move(outcome));
        }
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            if (under_way_ >= BATCHES_MAX) return 0;
            ++under_way_;
            batch->number = ++batches_;
            queue_.push_back(batch);
        }
        bell_.ring();
        return batch->number;
    }

    // What has ended since: (number, outcomes), of which each is (table, unknown) or (code, text).
    nb::list take() {
        done_bell_.quiet();
        std::vector<std::shared_ptr<Batch>> done;
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            done.swap(done_);
            under_way_ -= done.size();
        }
        nb::list out;
        for (const auto &batch : done) {
            nb::list outcomes;
            for (const Outcome &o : batch->outcomes) {
                if (o.code.empty())
                    outcomes.append(nb::make_tuple(as_tuple(o.found), o.unknown));
                else
                    outcomes.append(nb::make_tuple(o.code, o.text));
            }
            out.append(nb::make_tuple(batch->number, outcomes));
        }
        return out;
    }

    // Let go of connections to all but these: (address, pass) each.
    void keep(nb::list peers) {
        std::set<std::string> kept;
        for (nb::handle peer : peers) {
            const auto [address, pass] = nb::cast<std::pair<std::string, nb::bytes>>(peer);
            kept.insert(std::string(pass.c_str(), pass.size()).append(address));
        }
        const std::lock_guard<std::mutex> lock(mutex_);
        kept_ = std::make_unique<std::set<std::string>>(std::move(kept));
        bell_.ring();
    }
    void stop() {
        if (!worker_) return;
        stopping_ = true;
        bell_.ring();
        worker_->join();
        worker_.reset();
        connections_.clear();
    }

private:
    struct Connection {
        std::string where;
        Stream stream;
        bool connected = false;
        uint32_t watched = 0;
        std::deque<std::pair<int64_t, std::string>> waiting;  // requests that have not begun to leave
        size_t waiting_bytes = 0;
        std::set<int64_t> asked;  // requests that nobody has answered yet
        Connection(std::string where, int fd) : where(std::move(where)), stream(fd) {}
    };
    struct Pending {
        std::shared_ptr<Batch> batch;
        size_t index;
        Connection *connection;
    };

    void run() {
        epoll_event events[64];
        while (!stopping_) {
            const int count = poll_.wait(events, 64, by_s_.empty() ? INFINITY : by_s_.begin()->first);
            for (int i = 0; i < count; ++i) {
                const int fd = events[i].data.fd;
                if (fd == bell_.fd())
                    bell_.quiet();
                else if (const auto it = by_fd_.find(fd); it != by_fd_.end())
                    if (const char *why = served(*it->second, events[i].events)) lose(*it->second, why);
            }
            take_orders();
            end_late_ones();
        }
    }

    void take_orders() {
        std::deque<std::shared_ptr<Batch>> fresh;
        std::unique_ptr<std::set<std::string>> kept;
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            fresh.swap(queue_);
            kept.swap(kept_);
        }
        if (kept) {
            std::vector<Connection *> gone;
            for (const auto &[where, connection] : connections_)
                if (!kept->count(where)) gone.push_back(connection.get());
            for (Connection *c : gone) lose(*c, "is not a member any more");
        }
        for (const auto &batch : fresh) begin(batch);
    }

    void begin(const std::shared_ptr<Batch> &batch) {
        if (!batch->left) return finish(batch);
        by_s_.emplace(batch->by_s, batch);
        for (size_t i = 0; i < batch->asks.size(); ++i) {
            if (batch->outcomes[i].done) continue;
            try {
                send(batch, i);
            } catch (const std::exception &error) {
                fail(*batch, i, "lost", error.what());
            }
        }
        if (!batch->left) finish(batch);
    }

    void send(const std::shared_ptr<Batch> &batch, size_t index) {
        Ask &ask = batch->asks[index];
        auto it = connections_.find(ask.where);
        if (it == connections_.end()) it = connect(ask);
        Connection &c = *it->second;
        if (c.waiting_bytes + ask.request.size() > WAITING_BYTES_MAX) drop_unwanted(c);
        if (c.waiting_bytes + ask.request.size() > WAITING_BYTES_MAX)
            return fail(*batch, index, "busy", "too much waits for it already");
        pending_[ask.id] = {batch, index, &c};
        c.asked.insert(ask.id);
        c.waiting_bytes += ask.request.size();
        c.waiting.emplace_back(ask.id, std::move(ask.request));
        if (c.connected && !push(c)) lose(c, "has closed the connection");
    }

    std::unordered_map<std::string, std::unique_ptr<Connection>>::iterator connect(const Ask &ask) {
        const Target &to = ask.target;
        const int fd = checked(socket(to.address.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0), "socket");
        auto made = std::make_unique<Connection>(ask.where, fd);
        tune(fd);
        const int result = ::connect(fd, reinterpret_cast<const sockaddr *>(&to.address), to.length);
        if (result < 0 && errno != EINPROGRESS) checked(result, "connect");
        poll_.add(fd, EPOLLIN | EPOLLOUT);
        made->watched = EPOLLIN | EPOLLOUT;
        made->stream.put(to.pass);
        by_fd_[fd] = made.get();
        return connections_.emplace(ask.where, std::move(made)).first;
    }

    // What cannot be done for want of memory costs the connection it was for.
    const char *served(Connection &c, uint32_t events) {
        try {
            return serve(c, events);
        } catch (const std::exception &) {
            return "cannot be read for want of memory";
        }
    }
    // Why the connection is over; nullptr: it is not.
    const char *serve(Connection &c, uint32_t events) {
        if (!c.connected) {
            int error = 0;
            socklen_t size = sizeof error;
            getsockopt(c.stream.fd(), SOL_SOCKET, SO_ERROR, &error, &size);
            if (error) return "cannot be reached";
            if (!(events & EPOLLOUT)) return nullptr;
            c.connected = true;
        }
        if (events & (EPOLLIN | EPOLLHUP | EPOLLERR)) {
            if (!c.stream.receive()) return "has closed the connection";
            std::string_view message;
            int there;
            while ((there = c.stream.next(MESSAGE_BYTES_MAX, message)) > 0) {
                heard(c, message);
                c.stream.drop(4 + message.size());
            }
            if (there < 0) return "sent a message over the limit";
        }
        return push(c) ? nullptr : "has closed the connection";
    }

    // Let requests leave as far as there is room. False: the connection has ended.
    bool push(Connection &c) {
        for (;;) {
            if (!c.stream.flush()) return false;
            if (c.stream.unsent() || c.waiting.empty()) break;
            auto [id, request] = std::move(c.waiting.front());
            c.waiting.pop_front();
            c.waiting_bytes -= request.size();
            if (pending_.count(id)) c.stream.put_message(request);
        }
        const uint32_t wanted = c.stream.unsent() ? EPOLLIN | EPOLLOUT : EPOLLIN;
        if (wanted != c.watched) poll_.change(c.stream.fd(), wanted);
        c.watched = wanted;
        return true;
    }
    void drop_unwanted(Connection &c) {
        std::deque<std::pair<int64_t, std::string>> wanted;
        c.waiting_bytes = 0;
        for (auto &one : c.waiting)
            if (pending_.count(one.first)) {
                c.waiting_bytes += one.second.size();
                wanted.push_back(std::move(one));
            }
        c.waiting.swap(wanted);
    }

    // A reply. A late one finds nobody, and so does one to what another peer was asked.
    void heard(Connection &c, std::string_view message) {
        Outcome outcome;
        int64_t id = 0;
        Reply reply;
        try {
            reply = read_reply(message);
            id = reply.envelope.id;
        } catch (const BadVersion &error) {
            outcome.code = "version";
            outcome.text = error.what();
            id = peek_id(message);
        } catch (const std::exception &error) {
            outcome.code = "wire";
            outcome.text = error.what();
            id = peek_id(message);
        }
        const auto it = pending_.find(id);
        if (it == pending_.end() || it->second.connection != &c) return;
        const Pending asked = it->second;
        const Ask &ask = asked.batch->asks[asked.index];
        if (outcome.code.empty()) {
            if (reply.error) {
                outcome.code = reply.error->first.empty() ? "refused" : reply.error->first;
                outcome.text = reply.error->second;
            } else if (ask.incarnation && reply.envelope.sender.incarnation != ask.incarnation) {
                outcome.code = "refused";
                outcome.text = "answered as another incarnation";
            } else if (reply.found.counts.size() != ask.keys) {
                outcome.code = "wire";
                outcome.text = "answered another question";
            } else {
                outcome.found = std::move(reply.found);
                outcome.unknown = reply.unknown;
            }
        }
        end(id, std::move(outcome));
    }

    void fail(Batch &batch, size_t index, const char *code, std::string text) {
        Outcome outcome;
        outcome.code = code;
        outcome.text = std::move(text);
        set(batch, index, std::move(outcome));
    }
    // The first word stands: a send that failed half-way may still be answered.
    void set(Batch &batch, size_t index, Outcome outcome) {
        if (batch.outcomes[index].done) return;
        outcome.done = true;
        batch.outcomes[index] = std::move(outcome);
        --batch.left;
    }
    // A request that was asked has ended.
    void end(int64_t id, Outcome outcome) {
        const auto it = pending_.find(id);
        const Pending asked = std::move(it->second);
        pending_.erase(it);
        asked.connection->asked.erase(id);
        set(*asked.batch, asked.index, std::move(outcome));
        if (!asked.batch->left) finish(asked.batch);
    }
    void lose(Connection &c, const char *why) {
        const std::set<int64_t> asked = c.asked;
        for (const int64_t id : asked) {
            Outcome outcome;
            outcome.code = "lost";
            outcome.text = why;
            end(id, std::move(outcome));
        }
        by_fd_.erase(c.stream.fd());
        const std::string where = c.where;
        connections_.erase(where);
    }
    void end_late_ones() {
        const double now_s = monotonic_s();
        while (!by_s_.empty() && by_s_.begin()->first <= now_s) {
            const auto batch = by_s_.begin()->second;
            if (!batch->left) {
                by_s_.erase(by_s_.begin());
                continue;
            }
            for (size_t i = 0; i < batch->asks.size(); ++i)
                if (!batch->outcomes[i].done) {
                    Outcome outcome;
                    outcome.code = "deadline";
                    outcome.text = "did not answer in time";
                    end(batch->asks[i].id, std::move(outcome));
                }
        }
    }
    // Tell who waits for it, once: a send that loses its connection may end a batch that is still being begun.
    void finish(const std::shared_ptr<Batch> &batch) {
        if (batch->finished) return;
        batch->finished = true;
        const auto [first, last] = by_s_.equal_range(batch->by_s);
        for (auto it = first; it != last; ++it)
            if (it->second == batch) {
                by_s_.erase(it);
                break;
            }
        const std::lock_guard<std::mutex> lock(mutex_);
        done_.push_back(batch);
        done_bell_.ring();
    }

    Sender me_;  // of the caller's thread alone, as are the ids
    int64_t ids_ = 0;
    uint64_t batches_ = 0;
    std::mutex mutex_;
    std::deque<std::shared_ptr<Batch>> queue_;
    std::vector<std::shared_ptr<Batch>> done_;
    std::unique_ptr<std::set<std::string>> kept_;
    size_t under_way_ = 0;
    // Of the client's thread alone:
    std::unordered_map<std::string, std::unique_ptr<Connection>> connections_;
    std::unordered_map<int, Connection *> by_fd_;
    std::unordered_map<int64_t, Pending> pending_;
    std::multimap<double, std::shared_ptr<Batch>> by_s_;
    Poll poll_;
    Bell bell_, done_bell_;
    std::atomic<bool> stopping_{false};
    std::unique_ptr<Worker> worker_;
};

}  // namespace

void bind_directory_client(nb::module_ &m) {
    nb::class_<Client>(m, "DirectoryClient", "Asks peers' directories on a thread of its own.")
        .def(nb::init<std::string, int64_t>(), nb::arg("name"), nb::arg("incarnation"))
        .def_prop_ro("fd", &Client::fd, "To be watched: readable when `take` has something to tell.")
        .def("follow", &Client::follow, nb::arg("view_id"))
        .def("ask", &Client::ask, nb::arg("asks"), nb::arg("by_s"))
        .def("take", &Client::take)
        .def("keep", &Client::keep, nb::arg("peers"))
        .def("stop", &Client::stop, "End the thread and every connection.");
}

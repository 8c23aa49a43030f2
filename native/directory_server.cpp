// Answers peers' lookups out of this node's shard, on a thread of its own that never needs the GIL.
//
// A connection begins with the pass that this node gave its members; then follow requests, each answered in turn.
// Who does not read the answers is not read from either, so what is kept for a peer is one answer at most.

#include <atomic>
#include <cmath>
#include <memory>
#include <set>
#include <unordered_map>

#include "directory_py.h"
#include "directory_wire.h"
#include "stream.h"

namespace nb = nanobind;
using namespace p2pcache;

namespace {

constexpr size_t CONNECTIONS_MAX = 1024;
constexpr double NO_ROOM_S = 0.1;  // until it is tried again to accept, where descriptors ran out
constexpr double STRANGER_S = 5;   // within which a connection shows its pass

// What the answers depend on besides the shard. Replaced as a whole.
struct Standing {
    Sender me;
    std::unordered_map<std::string, int64_t> live;
    std::set<std::pair<std::string, int64_t>> past;  // incarnations that have left
};

class Server {
public:
    Server(const DirectoryHandle &directory, int listener, nb::bytes pass, std::string name, int64_t incarnation)
        : directory_(directory.shared), listener_(new Fd(listener)), pass_(pass.c_str(), pass.size()) {
        if (pass_.size() != PASS_BYTES) throw nb::value_error("a pass has 16 bytes");
        auto standing = std::make_shared<Standing>();
        standing->me = {std::move(name), incarnation, {}};
        standing_ = std::move(standing);
        poll_.add(**listener_, EPOLLIN);
        poll_.add(bell_.fd(), EPOLLIN);
        worker_ = std::make_unique<Worker>([this] { run(); });
    }
    ~Server() { stop(); }

    // Who is in the mesh now, and who was.
    void follow(nb::bytes view_id, nb::iterable members, nb::iterable past) {
        auto standing = std::make_shared<Standing>();
        standing->me = now()->me;
        standing->me.view_id = {view_id.c_str(), view_id.size()};
        for (nb::handle member : members) {
            const auto [name, incarnation] = nb::cast<std::pair<std::string, int64_t>>(member);
            standing->live[name] = incarnation;
        }
        for (nb::handle one : past) standing->past.insert(nb::cast<std::pair<std::string, int64_t>>(one));
        const std::lock_guard<std::mutex> lock(mutex_);
        standing_ = std::move(standing);
    }
    // Until when what is not known is unknown rather than absent.
    void unknown_until(double until_s) {
        const std::lock_guard<std::mutex> lock(mutex_);
        unknown_until_s_ = until_s;
    }
    // What is known under keys, as a peer would hear it.
    nb::tuple table(nb::bytes contents) {
        if (contents.size() % KEY_BYTES) throw nb::value_error("a key is 16 bytes");
        const auto standing = now();
        const double now_s = monotonic_s();
        return nb::make_tuple(as_tuple(find({contents.c_str(), contents.size()}, now_s, *standing)), unknown(now_s));
    }
    void stop() {
        if (!worker_) return;
        stopping_ = true;
        bell_.ring();
        worker_->join();
        worker_.reset();
        connections_.clear();
        listener_.reset();
    }

private:
    struct Connection {
        Stream stream;
        double since_s;
        bool passed = false, writing = false;
        Connection(int fd, double since_s) : stream(fd), since_s(since_s) {}
    };

    std::shared_ptr<const Standing> now() {
        const std::lock_guard<std::mutex> lock(mutex_);
        return standing_;
    }
    bool unknown(double now_s) {
        const std::lock_guard<std::mutex> lock(mutex_);
        return now_s < unknown_until_s_;
    }

    void run() {
        epoll_event events[64];
        while (!stopping_) {
            const int count = poll_.wait(events, 64, next_s());
            bool callers = false;
            for (int i = 0; i < count; ++i) {
                const int fd = events[i].data.fd;
                if (fd == bell_.fd())
                    bell_.quiet();
                else if (fd == **listener_)
                    callers = true;
                else if (const auto it = connections_.find(fd); it != connections_.end())
                    if (!goes_on(*it->second)) connections_.erase(it);
            }
            // Behind what concerns connections that may just have ended: a new one may get the number of an old one.
            if (callers) accept_some();
            look_at_the_clock();
        }
    }
    double next_s() const {
        double next = resting_until_s_;
        for (const int fd : strangers_)
            if (const auto it = connections_.find(fd); it != connections_.end())
                next = std::fmin(next, it->second->since_s + STRANGER_S);
        return next;
    }
    void look_at_the_clock() {
        const double now_s = monotonic_s();
        if (now_s >= resting_until_s_) {
            resting_until_s_ = INFINITY;
            poll_.change(**listener_, EPOLLIN);
        }
        for (auto it = strangers_.begin(); it != strangers_.end();) {
            const auto found = connections_.find(*it);
            if (found != connections_.end() && !found->second->passed &&
                now_s < found->second->since_s + STRANGER_S) {
                ++it;
                continue;
            }
            if (found != connections_.end() && !found->second->passed) connections_.erase(found);
            it = strangers_.erase(it);
        }
    }
    void accept_some() {
        for (;;) {
            const int fd = accept4(**listener_, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
            if (fd < 0) {
                if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
                    poll_.change(**listener_, 0);
                    resting_until_s_ = monotonic_s() + NO_ROOM_S;
                }
                return;
            }
            std::unique_ptr<Connection> made;
            try {
                made = std::make_unique<Connection>(fd, monotonic_s());
            } catch (const std::bad_alloc &) {
                close(fd);
                continue;
            }
            if (connections_.size() >= CONNECTIONS_MAX) continue;
            tune(fd);
            try {
                strangers_.insert(fd);
                poll_.add(fd, EPOLLIN);
                connections_[fd] = std::move(made);
            } catch (const std::exception &) {
                // No memory for it: the descriptor closes with `made`.
            }
        }
    }

    // What cannot be done for want of memory costs the connection it was for.
    bool goes_on(Connection &c) {
        try {
            return serve(c);
        } catch (const std::exception &) {
            return false;
        }
    }
    // False: the connection is over.
    bool serve(Connection &c) {
        if (c.writing) {
            if (!c.stream.flush()) return false;
        } else if (!c.stream.receive()) {
            return false;
        }
        if (!c.passed) {
            std::string shown;
            if (!c.stream.take(PASS_BYTES, shown)) return true;
            if (!is_pass(shown)) return false;
            c.passed = true;
        }
        std::string_view message;
        while (!c.stream.unsent()) {
            const int there = c.stream.next(REQUEST_BYTES_MAX, message);
            if (there < 0) return false;
            if (!there) break;
            c.stream.put_message(answer(message));
            c.stream.drop(4 + message.size());
            if (!c.stream.flush()) return false;
        }
        const bool writing = c.stream.unsent();
        if (writing != c.writing) poll_.change(c.stream.fd(), writing ? EPOLLOUT : EPOLLIN);
        c.writing = writing;
        return true;
    }
    // Takes as long for any that is none.
    bool is_pass(const std::string &shown) const {
        uint8_t differing = 0;
        for (size_t i = 0; i < PASS_BYTES; ++i) differing |= static_cast<uint8_t>(shown[i] ^ pass_[i]);
        return !differing;
    }

    std::string answer(std::string_view message) {
        const auto standing = now();
        const Sender &me = standing->me;
        try {
            const Request request = read_request(message);
            const Envelope &e = request.envelope;
            if (e.to != 0 && e.to != me.incarnation)
                return write_error(e.id, me, "refused", "that incarnation is gone; another runs here");
            if (fenced(e.sender, *standing))
                return write_error(e.id, me, "fenced", "this incarnation of " + e.sender.name + " is not a member any more");
            const double now_s = monotonic_s();
            std::string reply = write_reply(e.id, me, find(request.contents, now_s, *standing), unknown(now_s));
            if (reply.size() <= MESSAGE_BYTES_MAX) return reply;
            return write_error(e.id, me, "refused", "an answer over the limit of a message");
        } catch (const BadVersion &error) {
            return write_error(peek_id(message), me, "version", error.what());
        } catch (const BadMessage &error) {
            return write_error(peek_id(message), me, "refused", error.what());
        }
    }
    static bool fenced(const Sender &sender, const Standing &standing) {
        if (!standing.past.count({sender.name, sender.incarnation})) return false;
        const auto it = standing.live.find(sender.name);
        return it == standing.live.end() || it->second != sender.incarnation;
    }
    FoundColumns find(std::string_view contents, double now_s, const Standing &standing) {
        return directory_->table(contents.data(), contents.size() / KEY_BYTES, now_s,
                                 [&](uint32_t, const std::string &name, int64_t incarnation) {
                                     const auto it = standing.live.find(name);
                                     return it != standing.live.end() && it->second == incarnation;
                                 });
    }

    const std::shared_ptr<Directory> directory_;
    std::unique_ptr<Fd> listener_;
    const std::string pass_;
    std::mutex mutex_;
    std::shared_ptr<const Standing> standing_;
    double unknown_until_s_ = INFINITY;  // before it has been told
    // Of the thread alone:
    std::unordered_map<int, std::unique_ptr<Connection>> connections_;
    std::set<int> strangers_;  // who have not shown the pass yet, and some that are gone
    double resting_until_s_ = INFINITY;
    Poll poll_;
    Bell bell_;
    std::atomic<bool> stopping_{false};
    std::unique_ptr<Worker> worker_;
};

}  // namespace

void bind_directory_server(nb::module_ &m) {
    nb::class_<Server>(m, "DirectoryServer", "Answers lookups of peers on a thread of its own.")
        .def(nb::init<const DirectoryHandle &, int, nb::bytes, std::string, int64_t>(), nb::arg("directory"),
             nb::arg("listener"), nb::arg("pass_"), nb::arg("name"), nb::arg("incarnation"),
             "listener: the descriptor of a listening socket that does not block; it is the server's from now on.")
        .def("follow", &Server::follow, nb::arg("view_id"), nb::arg("members"), nb::arg("past"))
        .def("unknown_until", &Server::unknown_until, nb::arg("until_s"))
        .def("table", &Server::table, nb::arg("contents"), "(table, unknown), as a peer would hear it.")
        .def("stop", &Server::stop, "End the thread and every connection.");
}

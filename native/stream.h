// What both ends of the lookup's connections share: descriptors, an eventfd to wake a thread, and a TCP stream of
// messages, each preceded by its length as u32, little endian.

#pragma once

#include <cerrno>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <ctime>
#include <stdexcept>
#include <string>
#include <string_view>
#include <system_error>
#include <thread>

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

namespace p2pcache {

constexpr size_t PASS_BYTES = 16;
constexpr size_t READ_BYTES = 1u << 16;  // of one connection before others have their turn

inline int checked(int result, const char *what) {
    if (result < 0) throw std::system_error(errno, std::generic_category(), what);
    return result;
}

// A descriptor of our own.
class Fd {
public:
    explicit Fd(int fd = -1) : fd_(fd) {}
    ~Fd() {
        if (fd_ >= 0) close(fd_);
    }
    Fd(const Fd &) = delete;
    Fd &operator=(const Fd &) = delete;
    int operator*() const { return fd_; }

private:
    int fd_;
};

// As `time.monotonic()` of Python has it.
inline double monotonic_s() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

// Wakes whoever watches its descriptor.
class Bell {
public:
    Bell() : fd_(checked(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC), "eventfd")) {}
    int fd() const { return *fd_; }
    void ring() const {
        const uint64_t one = 1;
        [[maybe_unused]] const ssize_t n = write(*fd_, &one, sizeof one);
    }
    void quiet() const {
        uint64_t count;
        [[maybe_unused]] const ssize_t n = read(*fd_, &count, sizeof count);
    }

private:
    Fd fd_;
};

class Poll {
public:
    Poll() : fd_(checked(epoll_create1(EPOLL_CLOEXEC), "epoll_create1")) {}
    void add(int fd, uint32_t events) const { control(EPOLL_CTL_ADD, fd, events); }
    void change(int fd, uint32_t events) const { control(EPOLL_CTL_MOD, fd, events); }
    void remove(int fd) const { epoll_ctl(*fd_, EPOLL_CTL_DEL, fd, nullptr); }
    // until_s: on the monotonic clock; infinity: until something comes.
    int wait(epoll_event *events, int room, double until_s) const {
        int timeout_ms = -1;
        if (std::isfinite(until_s))
            timeout_ms = static_cast<int>(std::ceil(std::fmin(std::fmax(until_s - monotonic_s(), 0), 3600) * 1e3));
        const int n = epoll_wait(*fd_, events, room, timeout_ms);
        return n < 0 ? 0 : n;  // a signal
    }

private:
    void control(int op, int fd, uint32_t events) const {
        epoll_event event = {};
        event.events = events;
        event.data.fd = fd;
        checked(epoll_ctl(*fd_, op, fd, &event), "epoll_ctl");
    }
    Fd fd_;
};

// A thread that ends before its owner does. A forked child has only the memory of it, and leaves it alone.
class Worker {
public:
    template <typename Run> explicit Worker(Run run) : pid_(getpid()), thread_(new std::thread(run)) {}
    void join() {
        if (thread_ && getpid() == pid_) {
            thread_->join();
            delete thread_;
        }
        thread_ = nullptr;
    }

private:
    pid_t pid_;
    std::thread *thread_;
};

// So that a message leaves at once, and a host that has gone without a word is noticed.
inline void tune(int fd) {
    const auto set = [fd](int level, int option, int value) { setsockopt(fd, level, option, &value, sizeof value); };
    set(IPPROTO_TCP, TCP_NODELAY, 1);
    set(SOL_SOCKET, SO_KEEPALIVE, 1);
    set(IPPROTO_TCP, TCP_KEEPIDLE, 10);
    set(IPPROTO_TCP, TCP_KEEPINTVL, 5);
    set(IPPROTO_TCP, TCP_KEEPCNT, 3);
    set(IPPROTO_TCP, TCP_USER_TIMEOUT, 10'000);
}

// A connection's bytes, in and out. What is announced allocates nothing: buffers grow with what has come.
class Stream {
public:
    explicit Stream(int fd) : fd_(fd) {}
    int fd() const { return *fd_; }

    // Take what has come, a bounded part of it. False: the connection has ended.
    bool receive() {
        char buffer[READ_BYTES];
        const ssize_t n = recv(*fd_, buffer, sizeof buffer, 0);
        if (n > 0) in_.append(buffer, static_cast<size_t>(n));
        return n > 0 || (n < 0 && (errno == EAGAIN || errno == EINTR));
    }
    // The first `size` bytes that have come; false where there are not so many yet.
    bool take(size_t size, std::string &out) {
        if (in_.size() - at_ < size) return false;
        out.assign(in_, at_, size);
        drop(size);
        return true;
    }
    // The next message, to be `drop`ped: 1 there is one, 0 not yet, -1 it is over the limit.
    int next(size_t limit, std::string_view &message) const {
        if (in_.size() - at_ < 4) return 0;
        uint32_t size;
        std::memcpy(&size, in_.data() + at_, 4);
        if (size > limit) return -1;
        if (in_.size() - at_ - 4 < size) return 0;
        message = std::string_view(in_).substr(at_ + 4, size);
        return 1;
    }
    void drop(size_t size) {
        at_ += size;
        if (at_ < in_.size()) {
            if (at_ > READ_BYTES) {
                in_.erase(0, at_);
                at_ = 0;
            }
            return;
        }
        if (in_.capacity() > 8 * READ_BYTES) in_ = {};
        in_.clear();
        at_ = 0;
    }

    void put(std::string_view raw) { out_.append(raw); }
    void put_message(std::string_view message) {
        const auto size = static_cast<uint32_t>(message.size());
        out_.append(reinterpret_cast<const char *>(&size), sizeof size);
        out_.append(message);
    }
    size_t unsent() const { return out_.size() - sent_; }
    // Send what there is room for. False: the connection has ended.
    bool flush() {
        while (unsent()) {
            const ssize_t n = send(*fd_, out_.data() + sent_, unsent(), MSG_NOSIGNAL | MSG_DONTWAIT);
            if (n < 0) return errno == EAGAIN || errno == EINTR;
            sent_ += static_cast<size_t>(n);
        }
        if (out_.capacity() > 8 * READ_BYTES) out_ = {};
        out_.clear();
        sent_ = 0;
        return true;
    }

private:
    Fd fd_;
    std::string in_, out_;
    size_t at_ = 0, sent_ = 0;
};

}  // namespace p2pcache

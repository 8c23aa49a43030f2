// A small io_uring: vectored reads and writes of files, several under way at once, for one thread.
// By system calls alone (liburing is not needed). The Python twin, which works wherever preadv does,
// is `ThreadsIo` in p2pcache/io/_nvme_io.py; both pass the same tests.
//
// Source: io_uring(7), io_uring_setup(2), io_uring_enter(2).

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <utility>

#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>

#if __has_include(<linux/io_uring.h>)
#include <linux/io_uring.h>
#define P2PCACHE_HAS_URING 1
#endif

namespace nb = nanobind;

namespace {

[[noreturn]] void raise_os_error(int error) {
    errno = error;
    PyErr_SetFromErrno(PyExc_OSError);
    throw nb::python_error();
}

#ifdef P2PCACHE_HAS_URING

// Later than some kernel headers that this must compile with.
constexpr unsigned SINGLE_ISSUER = 1u << 12;   // Linux 6.0
constexpr unsigned DEFER_TASKRUN = 1u << 13;   // Linux 6.1
constexpr int PARTS_MAX = 8;

template <typename T>
T *at(void *base, unsigned offset) {
    return reinterpret_cast<T *>(static_cast<char *>(base) + offset);
}

class Ring {
  public:
    // Raises OSError where the kernel, or a filter of system calls, refuses.
    explicit Ring(unsigned entries) {
        io_uring_params params{};
        params.flags = SINGLE_ISSUER | DEFER_TASKRUN;
        fd_ = setup(entries, params);
        if (fd_ < 0 && errno == EINVAL) {  // an older kernel
            params = {};
            fd_ = setup(entries, params);
        }
        if (fd_ < 0) raise_os_error(errno);
        // One mapping for both queues (5.4), and iovecs that need not outlive the submission (5.5).
        if (!(params.features & IORING_FEAT_SINGLE_MMAP) || !(params.features & IORING_FEAT_SUBMIT_STABLE)) {
            ::close(fd_);
            raise_os_error(ENOSYS);
        }
        map(params);
    }

    Ring(const Ring &) = delete;
    Ring &operator=(const Ring &) = delete;

    ~Ring() {
        while (in_flight_ && reap_one() == 0) {}  // memory must not be written after we are gone
        ::munmap(sqes_, sqes_bytes_);
        ::munmap(rings_, rings_bytes_);
        ::close(fd_);
    }

    unsigned in_flight() const { return in_flight_; }

    // Start one vectored read or write; `parts` are buffers that live, and stay where they are,
    // until `wait` has told of `tag`.
    void submit(uint64_t tag, bool write, int fd, uint64_t offset, nb::list parts) {
        iovec vectors[PARTS_MAX];
        if (parts.size() > PARTS_MAX) throw std::invalid_argument("too many parts");
        if (in_flight_ == entries_) throw std::invalid_argument("the ring is full");
        unsigned count = 0;
        for (nb::handle part : parts) vectors[count++] = address(part, !write);
        const unsigned tail = *sq_tail_;
        const unsigned index = tail & sq_mask_;
        io_uring_sqe &sqe = sqes_[index];
        std::memset(&sqe, 0, sizeof sqe);
        sqe.opcode = write ? IORING_OP_WRITEV : IORING_OP_READV;
        sqe.fd = fd;
        sqe.off = offset;
        sqe.addr = reinterpret_cast<uint64_t>(vectors);
        sqe.len = count;
        sqe.user_data = tag;
        sq_array_[index] = index;
        __atomic_store_n(sq_tail_, tail + 1, __ATOMIC_RELEASE);
        int error;
        {
            nb::gil_scoped_release release;
            error = enter(1, 0, 0);
        }
        if (error) {  // the kernel took nothing
            __atomic_store_n(sq_tail_, tail, __ATOMIC_RELEASE);
            raise_os_error(error);
        }
        ++in_flight_;
    }

    // (tag, bytes moved or minus errno) of one that has ended; waits for it, without the GIL.
    std::pair<uint64_t, int> wait() {
        if (!in_flight_) throw std::invalid_argument("nothing is under way");
        int error;
        {
            nb::gil_scoped_release release;
            error = reap_one();
        }
        if (error) raise_os_error(error);
        return {last_.user_data, last_.res};
    }

  private:
    static int setup(unsigned entries, io_uring_params &params) {
        return static_cast<int>(::syscall(__NR_io_uring_setup, entries, &params));
    }

    static iovec address(nb::handle part, bool writable) {
        Py_buffer buffer;
        if (PyObject_GetBuffer(part.ptr(), &buffer, writable ? PyBUF_WRITABLE : PyBUF_SIMPLE))
            throw nb::python_error();
        const iovec found{buffer.buf, static_cast<size_t>(buffer.len)};
        PyBuffer_Release(&buffer);  // the caller keeps it alive
        return found;
    }

    void map(const io_uring_params &params) {
        const size_t sq = params.sq_off.array + params.sq_entries * sizeof(unsigned);
        const size_t cq = params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe);
        rings_bytes_ = sq > cq ? sq : cq;
        sqes_bytes_ = params.sq_entries * sizeof(io_uring_sqe);
        const int protection = PROT_READ | PROT_WRITE, flags = MAP_SHARED | MAP_POPULATE;
        rings_ = ::mmap(nullptr, rings_bytes_, protection, flags, fd_, IORING_OFF_SQ_RING);
        void *sqes = ::mmap(nullptr, sqes_bytes_, protection, flags, fd_, IORING_OFF_SQES);
        if (rings_ == MAP_FAILED || sqes == MAP_FAILED) {
            const int error = errno;
            if (rings_ != MAP_FAILED) ::munmap(rings_, rings_bytes_);
            if (sqes != MAP_FAILED) ::munmap(sqes, sqes_bytes_);
            ::close(fd_);
            raise_os_error(error);
        }
        sqes_ = static_cast<io_uring_sqe *>(sqes);
        entries_ = params.sq_entries;
        sq_tail_ = at<unsigned>(rings_, params.sq_off.tail);
        sq_mask_ = *at<unsigned>(rings_, params.sq_off.ring_mask);
        sq_array_ = at<unsigned>(rings_, params.sq_off.array);
        cq_head_ = at<unsigned>(rings_, params.cq_off.head);
        cq_tail_ = at<unsigned>(rings_, params.cq_off.tail);
        cq_mask_ = *at<unsigned>(rings_, params.cq_off.ring_mask);
        cqes_ = at<io_uring_cqe>(rings_, params.cq_off.cqes);
    }

    // 0, or an errno. Interruptions are no errors: whoever waits must not leave before its IO has ended.
    int enter(unsigned submit, unsigned complete, unsigned flags) {
        for (;;) {
            const long taken = ::syscall(__NR_io_uring_enter, fd_, submit, complete, flags, nullptr, 0);
            if (taken >= 0) return taken < static_cast<long>(submit) ? EAGAIN : 0;
            const bool again = errno == EINTR || (!submit && (errno == EAGAIN || errno == EBUSY));
            if (!again) return errno;
        }
    }

    int reap_one() {
        const unsigned head = *cq_head_;
        while (head == __atomic_load_n(cq_tail_, __ATOMIC_ACQUIRE))
            if (const int error = enter(0, 1, IORING_ENTER_GETEVENTS)) return error;
        last_ = cqes_[head & cq_mask_];
        __atomic_store_n(cq_head_, head + 1, __ATOMIC_RELEASE);
        --in_flight_;
        return 0;
    }

    int fd_ = -1;
    void *rings_ = nullptr;
    size_t rings_bytes_ = 0, sqes_bytes_ = 0;
    unsigned entries_ = 0, in_flight_ = 0, sq_mask_ = 0, cq_mask_ = 0;
    unsigned *sq_tail_ = nullptr, *sq_array_ = nullptr, *cq_head_ = nullptr, *cq_tail_ = nullptr;
    io_uring_sqe *sqes_ = nullptr;
    io_uring_cqe *cqes_ = nullptr;
    io_uring_cqe last_{};
};

#else

class Ring {  // compiled without the kernel's header: as if the kernel refused
  public:
    explicit Ring(unsigned) { raise_os_error(ENOSYS); }
    unsigned in_flight() const { return 0; }
    void submit(uint64_t, bool, int, uint64_t, nb::list) {}
    std::pair<uint64_t, int> wait() { return {0, -ENOSYS}; }
};

#endif

}  // namespace

void bind_uring(nb::module_ &m) {
    nb::class_<Ring>(m, "Ring", "An io_uring for one thread; see p2pcache/io/_nvme_io.py.")
        .def(nb::init<unsigned>(), nb::arg("entries"))
        .def_prop_ro("in_flight", &Ring::in_flight)
        .def("submit", &Ring::submit, nb::arg("tag"), nb::arg("write"), nb::arg("fd"), nb::arg("offset"),
             nb::arg("parts"), "Start one vectored read or write of a file. Raises OSError.")
        .def("wait", &Ring::wait, "(tag, bytes moved or minus errno) of one that has ended.");
}

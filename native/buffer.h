// A Python buffer for the time of a call or of an object: flat bytes, and the export that keeps them there.

#pragma once

#include <cstdint>

#include <nanobind/nanobind.h>

struct Buffer {
    uint8_t *data = nullptr;
    size_t nbytes = 0;

    Buffer(nanobind::handle object, bool writable) {
        if (PyObject_GetBuffer(object.ptr(), &view_, writable ? PyBUF_WRITABLE : PyBUF_SIMPLE))
            throw nanobind::python_error();
        data = static_cast<uint8_t *>(view_.buf);
        nbytes = static_cast<size_t>(view_.len);
    }
    ~Buffer() { PyBuffer_Release(&view_); }
    Buffer(const Buffer &) = delete;
    Buffer &operator=(const Buffer &) = delete;

private:
    Py_buffer view_;
};

// The extension `p2pcache._native`. Each source file binds its own functions.

#include <nanobind/nanobind.h>

namespace nb = nanobind;

void bind_checksum(nb::module_ &m);
void bind_chunking(nb::module_ &m);
void bind_directory(nb::module_ &m);
void bind_directory_client(nb::module_ &m);
void bind_directory_server(nb::module_ &m);
void bind_found(nb::module_ &m);
void bind_key_map(nb::module_ &m);
void bind_keys(nb::module_ &m);
void bind_lossless(nb::module_ &m);
void bind_plans(nb::module_ &m);
void bind_quantise(nb::module_ &m);
void bind_ring(nb::module_ &m);
void bind_rotate(nb::module_ &m);
void bind_uring(nb::module_ &m);

NB_MODULE(_native, m) {
    m.doc() = "The native core of p2pcache. Every function has a Python twin that tests compare it with.";
    bind_checksum(m);
    bind_chunking(m);
    bind_directory(m);
    bind_directory_client(m);
    bind_directory_server(m);
    bind_found(m);
    bind_key_map(m);
    bind_keys(m);
    bind_lossless(m);
    bind_plans(m);
    bind_quantise(m);
    bind_ring(m);
    bind_rotate(m);
    bind_uring(m);
}

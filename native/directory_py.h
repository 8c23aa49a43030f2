// The directory as Python objects hold it: shared with the threads that read it.

#pragma once

#include <memory>

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include "directory.h"

namespace p2pcache {

struct DirectoryHandle {
    std::shared_ptr<Directory> shared;
};

inline nanobind::bytes as_bytes(const std::string &text) { return nanobind::bytes(text.data(), text.size()); }

inline nanobind::list as_texts(const std::vector<std::string> &texts) {
    nanobind::list out;
    for (const std::string &text : texts) out.append(nanobind::str(text.data(), text.size()));
    return out;
}

// As `p2pcache.core.found.Table` has them.
inline nanobind::tuple as_tuple(const FoundColumns &c) {
    const auto *numbers = reinterpret_cast<const char *>(c.incarnations.data());
    return nanobind::make_tuple(as_texts(c.names), nanobind::bytes(numbers, 8 * c.incarnations.size()),
                                as_texts(c.codecs), as_bytes(c.counts), as_bytes(c.bodies), as_bytes(c.holders));
}

}  // namespace p2pcache

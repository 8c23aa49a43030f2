// The messages of a lookup between nodes: `directory.lookup` of p2pcache/core/wire.py, whose docstring is their
// spec, and whose `encode` and `decode` are the Python twins that tests compare these with.
//
// What is read is a stranger's. Every length is checked against the bytes that are there before it is used, nothing
// is allocated by a length that was only announced, and any defect is a `BadMessage`.

#pragma once

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "directory.h"

namespace p2pcache {

constexpr uint64_t PROTOCOL_VERSION = 4;
constexpr size_t MESSAGE_BYTES_MAX = 16u << 20, LOOKUP_KEYS_MAX = 65'536;
constexpr size_t REQUEST_BYTES_MAX = LOOKUP_KEYS_MAX * KEY_BYTES + 4096;
constexpr size_t NAME_MAX_CHARS = 256, CODEC_MAX_CHARS = 32;
constexpr const char *LOOKUP_OP = "directory.lookup";

struct BadMessage : std::runtime_error {
    using std::runtime_error::runtime_error;
};
struct BadVersion : BadMessage {
    explicit BadVersion(uint64_t theirs);
};

// Who sends a message.
struct Sender {
    std::string name;
    int64_t incarnation = 0;
    std::string view_id;
};

struct Envelope {
    char kind = 0;
    int64_t id = 0;
    std::string op;
    int64_t to = 0;
    Sender sender;
};

struct Request {
    Envelope envelope;
    std::string contents;  // keys, joined
};

struct Reply {
    Envelope envelope;
    FoundColumns found;
    bool unknown = false;
    std::optional<std::pair<std::string, std::string>> error;  // code and text; then there is no table
};

// What these throw is BadMessage.
Request read_request(std::string_view raw);
Reply read_reply(std::string_view raw);
// The id of a message that was refused, 0 where it has none.
int64_t peek_id(std::string_view raw);

std::string write_request(int64_t id, int64_t to, const Sender &sender, std::string_view contents);
std::string write_reply(int64_t id, const Sender &sender, const FoundColumns &found, bool unknown);
std::string write_error(int64_t id, const Sender &sender, std::string_view code, std::string_view text);

// The first defect of a table's records, in words; empty where there is none.
const char *found_defect(std::string_view counts, std::string_view bodies, std::string_view holders, size_t members,
                         size_t codecs, size_t holders_max);

}  // namespace p2pcache

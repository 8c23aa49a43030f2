// Reading and writing of directory_wire.h.

#include "directory_wire.h"

#include <cstring>

namespace p2pcache {

namespace {

constexpr size_t FIELDS = 9, VIEW_ID_BYTES = 8, OP_MAX = 32, CODE_MAX = 32, ERROR_TEXT_MAX = 4096;

// How many characters a text in UTF-8 has; nothing where it is none.
std::optional<size_t> characters(std::string_view text) {
    const auto *p = reinterpret_cast<const uint8_t *>(text.data()), *end = p + text.size();
    size_t count = 0;
    for (; p < end; ++count) {
        const uint8_t lead = *p++;
        if (lead < 0x80) continue;
        const int more = lead >= 0xF0 ? 3 : lead >= 0xE0 ? 2 : 1;
        if (lead < 0xC2 || lead > 0xF4 || end - p < more) return {};
        // The second byte says whether it is too long a form, half a surrogate pair, or above the last one.
        const uint8_t low = lead == 0xE0 ? 0xA0 : lead == 0xF0 ? 0x90 : 0x80;
        const uint8_t high = lead == 0xED ? 0x9F : lead == 0xF4 ? 0x8F : 0xBF;
        if (*p < low || *p > high) return {};
        for (int i = 1; i < more; ++i)
            if ((p[i] & 0xC0) != 0x80) return {};
        p += more;
    }
    return count;
}

// A msgpack value after the other.
class Reader {
public:
    explicit Reader(std::string_view raw) : raw_(raw) {}

    size_t array() { return sized(0x90, 0x9F, 0, 0xDC, 0xDD, "expected an array"); }
    size_t map() { return sized(0x80, 0x8F, 0, 0xDE, 0xDF, "expected a map"); }
    std::string_view text(size_t limit) {
        const std::string_view got = take(sized(0xA0, 0xBF, 0xD9, 0xDA, 0xDB, "expected text"));
        const auto count = characters(got);
        if (!count) throw BadMessage("a text that is not UTF-8");
        if (*count > limit) throw BadMessage("a text that is too long");
        return got;
    }
    std::string_view bytes(size_t limit) {
        const std::string_view got = take(sized(1, 0, 0xC4, 0xC5, 0xC6, "expected bytes"));
        if (got.size() > limit) throw BadMessage("too many bytes");
        return got;
    }
    bool boolean() {
        const uint8_t tag = byte();
        if (tag != 0xC2 && tag != 0xC3) throw BadMessage("expected a bool");
        return tag == 0xC3;
    }
    // None of the fields may be below zero.
    uint64_t number() {
        const uint8_t tag = byte();
        if (tag < 0x80) return tag;
        if (tag >= 0xCC && tag <= 0xCF) return big_endian(size_t{1} << (tag - 0xCC));
        if (tag >= 0xD0 && tag <= 0xD3) {
            const size_t size = size_t{1} << (tag - 0xD0);
            const uint64_t got = big_endian(size);
            if (!(got >> (8 * size - 1))) return got;
        }
        throw BadMessage("expected a number that is not below zero");
    }
    int64_t number63() {
        const uint64_t got = number();
        if (got >> 63) throw BadMessage("a number that is out of range");
        return static_cast<int64_t>(got);
    }
    void end() const {
        if (!raw_.empty()) throw BadMessage("more bytes than the message has");
    }

private:
    std::string_view take(size_t size) {
        if (size > raw_.size()) throw BadMessage("the message ends too soon");
        const std::string_view got = raw_.substr(0, size);
        raw_.remove_prefix(size);
        return got;
    }
    uint8_t byte() { return static_cast<uint8_t>(take(1)[0]); }
    uint64_t big_endian(size_t size) {
        uint64_t got = 0;
        for (const char c : take(size)) got = got << 8 | static_cast<uint8_t>(c);
        return got;
    }
    // A length: within the tag itself, or behind it in 1, 2 or 4 bytes (0: there is no such tag).
    size_t sized(uint8_t first, uint8_t last, uint8_t tag8, uint8_t tag16, uint8_t tag32, const char *expected) {
        const uint8_t tag = byte();
        size_t size = 0;
        if (first <= tag && tag <= last)
            size = tag - first;
        else if (tag8 && tag == tag8)
            size = big_endian(1);
        else if (tag == tag16)
            size = big_endian(2);
        else if (tag == tag32)
            size = big_endian(4);
        else
            throw BadMessage(expected);
        if (size > raw_.size()) throw BadMessage("the message ends too soon");  // a value takes a byte at least
        return size;
    }

    std::string_view raw_;
};

Envelope read_envelope(Reader &in) {
    const size_t fields = in.array();
    if (!fields) throw BadMessage("not a p2pcache message");
    const uint64_t version = in.number();
    if (version != PROTOCOL_VERSION) throw BadVersion(version);
    if (fields != FIELDS) throw BadMessage("expected 9 values");
    Envelope out;
    const std::string_view kind = in.text(1);
    if (kind != "q" && kind != "r" && kind != "e") throw BadMessage("unknown kind of message");
    out.kind = kind[0];
    out.id = in.number63();
    out.op = in.text(OP_MAX);
    out.to = in.number63();
    out.sender.name = in.text(NAME_MAX_CHARS);
    out.sender.incarnation = in.number63();
    out.sender.view_id = in.bytes(VIEW_ID_BYTES);
    return out;
}

void expect_fields(Reader &in, size_t count) {
    if (in.map() != count) throw BadMessage("other fields than these");
}

std::vector<std::string> read_texts(Reader &in, size_t count_max, size_t limit) {
    const size_t count = in.array();
    if (count > count_max) throw BadMessage("too many texts");
    std::vector<std::string> out;  // grows by what is there
    for (size_t i = 0; i < count; ++i) out.emplace_back(in.text(limit));
    return out;
}

FoundColumns read_found(Reader &in) {
    if (in.array() != 6) throw BadMessage("expected 6 columns");
    FoundColumns out;
    out.names = read_texts(in, FOUND_MEMBERS_MAX, NAME_MAX_CHARS);
    const std::string_view incarnations = in.bytes(MESSAGE_BYTES_MAX);
    out.codecs = read_texts(in, FOUND_CODECS_MAX, CODEC_MAX_CHARS);
    out.counts = in.bytes(LOOKUP_KEYS_MAX);
    out.bodies = in.bytes(MESSAGE_BYTES_MAX);
    out.holders = in.bytes(MESSAGE_BYTES_MAX);
    if (incarnations.size() != 8 * out.names.size()) throw BadMessage("not an incarnation a name");
    out.incarnations.resize(out.names.size());
    if (!incarnations.empty()) std::memcpy(out.incarnations.data(), incarnations.data(), incarnations.size());
    for (const int64_t incarnation : out.incarnations)
        if (incarnation < 0) throw BadMessage("not an incarnation a name");
    const char *defect = found_defect(out.counts, out.bodies, out.holders, out.names.size(), out.codecs.size(),
                                      FOUND_HOLDERS_MAX);
    if (*defect) throw BadMessage(defect);
    return out;
}

// A msgpack value after the other, each in its shortest form, as the msgpack package writes them.
class Writer {
public:
    explicit Writer(size_t room) { out_.reserve(room); }
    std::string out() && { return std::move(out_); }

    void array(size_t n) { head(n, 15, 0x90, 0, 0xDC, 0xDD); }
    void map(size_t n) { head(n, 15, 0x80, 0, 0xDE, 0xDF); }
    void text(std::string_view v) {
        head(v.size(), 31, 0xA0, 0xD9, 0xDA, 0xDB);
        out_.append(v);
    }
    void bytes(std::string_view v) {
        head(v.size(), -1, 0, 0xC4, 0xC5, 0xC6);
        out_.append(v);
    }
    void boolean(bool v) { tag(v ? 0xC3 : 0xC2); }
    void number(uint64_t v) {
        if (v < 0x80)
            tag(static_cast<uint8_t>(v));
        else
            for (const unsigned width : {0u, 1u, 2u, 3u})
                if (width == 3 || v >> (8u << width) == 0) {
                    tag(static_cast<uint8_t>(0xCC + width));
                    big_endian(v, 1u << width);
                    return;
                }
    }

private:
    void tag(uint8_t t) { out_.push_back(static_cast<char>(t)); }
    void big_endian(uint64_t v, unsigned size) {
        while (size--) out_.push_back(static_cast<char>(v >> (8 * size)));
    }
    void head(size_t n, int fix_max, uint8_t fix, uint8_t tag8, uint8_t tag16, uint8_t tag32) {
        if (fix_max >= 0 && n <= static_cast<size_t>(fix_max)) {
            tag(static_cast<uint8_t>(fix + n));
        } else if (tag8 && n <= 0xFF) {
            tag(tag8);
            big_endian(n, 1);
        } else if (n <= 0xFFFF) {
            tag(tag16);
            big_endian(n, 2);
        } else {
            tag(tag32);
            big_endian(n, 4);
        }
    }

    std::string out_;
};

void write_envelope(Writer &out, const char *kind, int64_t id, int64_t to, const Sender &sender) {
    out.array(FIELDS);
    out.number(PROTOCOL_VERSION);
    out.text(kind);
    out.number(static_cast<uint64_t>(id));
    out.text(LOOKUP_OP);
    out.number(static_cast<uint64_t>(to));
    out.text(sender.name);
    out.number(static_cast<uint64_t>(sender.incarnation));
    out.bytes(sender.view_id);
}

void write_texts(Writer &out, const std::vector<std::string> &texts) {
    out.array(texts.size());
    for (const std::string &text : texts) out.text(text);
}

}  // namespace

BadVersion::BadVersion(uint64_t theirs)
    : BadMessage("the other side speaks p2pcache protocol " + std::to_string(theirs) + ", this one speaks " +
                 std::to_string(PROTOCOL_VERSION)) {}

Request read_request(std::string_view raw) {
    if (raw.size() > REQUEST_BYTES_MAX) throw BadMessage("a message over the limit");
    Reader in(raw);
    Request out{read_envelope(in), {}};
    if (out.envelope.kind != 'q') throw BadMessage("only requests are answered here");
    if (out.envelope.op != LOOKUP_OP) throw BadMessage("only lookups are answered here");
    expect_fields(in, 1);
    if (in.text(OP_MAX) != "contents") throw BadMessage("expected the field contents");
    out.contents = in.bytes(LOOKUP_KEYS_MAX * KEY_BYTES);
    if (out.contents.size() % KEY_BYTES) throw BadMessage("expected records of 16 bytes");
    in.end();
    return out;
}

Reply read_reply(std::string_view raw) {
    if (raw.size() > MESSAGE_BYTES_MAX) throw BadMessage("a message over the limit");
    Reader in(raw);
    Reply out{read_envelope(in), {}, false, {}};
    if (out.envelope.kind == 'q') throw BadMessage("a request where a reply was expected");
    expect_fields(in, 2);
    bool first = false, second = false;
    if (out.envelope.kind == 'e') {
        std::string code, text;
        for (int i = 0; i < 2; ++i) {
            const std::string_view field = in.text(OP_MAX);
            if (field == "code" && !first) {
                code = in.text(CODE_MAX);
                first = true;
            } else if (field == "text" && !second) {
                text = in.text(ERROR_TEXT_MAX);
                second = true;
            } else {
                throw BadMessage("expected the fields code, text");
            }
        }
        out.error.emplace(std::move(code), std::move(text));
    } else {
        if (out.envelope.op != LOOKUP_OP) throw BadMessage("an answer to something else");
        for (int i = 0; i < 2; ++i) {
            const std::string_view field = in.text(OP_MAX);
            if (field == "found" && !first) {
                out.found = read_found(in);
                first = true;
            } else if (field == "unknown" && !second) {
                out.unknown = in.boolean();
                second = true;
            } else {
                throw BadMessage("expected the fields found, unknown");
            }
        }
    }
    in.end();
    return out;
}

int64_t peek_id(std::string_view raw) {
    try {
        Reader in(raw);
        if (in.array() < 3) return 0;
        in.number();
        in.text(OP_MAX);
        return in.number63();
    } catch (const BadMessage &) {
        return 0;
    }
}

std::string write_request(int64_t id, int64_t to, const Sender &sender, std::string_view contents) {
    Writer out(contents.size() + sender.name.size() + 96);
    write_envelope(out, "q", id, to, sender);
    out.map(1);
    out.text("contents");
    out.bytes(contents);
    return std::move(out).out();
}

std::string write_reply(int64_t id, const Sender &sender, const FoundColumns &found, bool unknown) {
    Writer out(found.counts.size() + found.bodies.size() + found.holders.size() + 64 * found.names.size() + 512);
    write_envelope(out, "r", id, 0, sender);
    out.map(2);
    out.text("found");
    out.array(6);
    write_texts(out, found.names);
    out.bytes({reinterpret_cast<const char *>(found.incarnations.data()), 8 * found.incarnations.size()});
    write_texts(out, found.codecs);
    for (const std::string *column : {&found.counts, &found.bodies, &found.holders}) out.bytes(*column);
    out.text("unknown");
    out.boolean(unknown);
    return std::move(out).out();
}

std::string write_error(int64_t id, const Sender &sender, std::string_view code, std::string_view text) {
    Writer out(text.size() + 256);
    write_envelope(out, "e", id, 0, sender);
    out.map(2);
    out.text("code");
    out.text(code);
    out.text("text");
    out.text(text);
    return std::move(out).out();
}

const char *found_defect(std::string_view counts, std::string_view bodies, std::string_view holders, size_t members,
                         size_t codecs, size_t holders_max) {
    const auto *body = reinterpret_cast<const FoundBody *>(bodies.data());
    const auto *holder = reinterpret_cast<const FoundHolder *>(holders.data());
    size_t total = 0;
    bool over = false;
    for (const char c : counts) {
        total += static_cast<uint8_t>(c);
        over |= static_cast<uint8_t>(c) > FOUND_BODIES_MAX;
    }
    if (bodies.size() != total * sizeof(FoundBody) || holders.size() % sizeof(FoundHolder))
        return "the records are not as many as the counts say";
    if (over) return "too many bodies under a key";
    size_t left = holders.size() / sizeof(FoundHolder);
    std::vector<size_t> named(members);  // by which body each member was named last; the first body is 1
    for (size_t serial = 1; serial <= total; ++serial, ++body) {
        const auto nbytes = static_cast<int64_t>(body->nbytes);
        if (!carries(body->tokens, body->base_position, nbytes, body->provenance) || body->codec >= codecs)
            return "a body's field is out of range";
        if (body->holders == 0 || body->holders > holders_max || body->holders > left)
            return "a body has too few or too many holders";
        left -= body->holders;
        for (size_t h = 0; h < body->holders; ++h, ++holder) {
            if (holder->member >= members || holder->tier > TIER_MAX) return "a holder's field is out of range";
            if (named[holder->member] == serial) return "a body names a holder twice";
            named[holder->member] = serial;
        }
    }
    return left == 0 ? "" : "the records are not as many as the counts say";
}

}  // namespace p2pcache

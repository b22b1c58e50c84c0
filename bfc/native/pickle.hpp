// A pickle written without Python objects: the operations of protocol 4 that a snapshot needs. The reader of
// pytorch.org/memory_viz knows them all. Every function may throw std::bad_alloc.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

namespace bfc {

class Pickle {
public:
    Pickle() : out_("\x80\x04") {}

    const std::string& content() const { return out_; }
    void reserve(size_t bytes) { out_.reserve(bytes); }

    void none() { put('N'); }
    void boolean(bool value) { put(value ? '\x88' : '\x89'); }

    void number(uint64_t value) {
        if (value < 1 << 8) return put_bytes('K', value, 1);
        if (value < 1 << 16) return put_bytes('M', value, 2);
        if (value < uint64_t{1} << 31) return put_bytes('J', value, 4);
        size_t count = 4;                           // LONG1: its highest bit is the sign
        while (count < 8 && value >> (8 * count - 1)) ++count;
        const bool needs_a_zero = value >> 63;
        put('\x8a');
        put(static_cast<char>(count + needs_a_zero));
        append(value, count);
        if (needs_a_zero) put('\0');
    }
    void signed_number(int64_t value) {
        if (value >= 0) return number(static_cast<uint64_t>(value));
        put('\x8a');
        put('\x08');
        append(static_cast<uint64_t>(value), 8);
    }
    void real(double value) {                       // its highest byte first
        uint64_t bits;
        std::memcpy(&bits, &value, sizeof bits);
        put('G');
        for (int i = 56; i >= 0; i -= 8) put(static_cast<char>(bits >> i));
    }
    void text(std::string_view utf8) {
        if (utf8.size() < 256) put_bytes('\x8c', utf8.size(), 1);
        else put_bytes('X', utf8.size(), 4);
        out_.append(utf8);
    }

    // Memoizes the last value under the next number; `again` with that number refers to it.
    uint32_t remember() {
        put('\x94');
        return remembered_++;
    }
    void again(uint32_t number) {
        if (number < 256) put_bytes('h', number, 1);
        else put_bytes('j', number, 4);
    }

    // For texts that are written often: `name` writes one by the index that `add_name` returned.
    uint32_t add_name(const std::string& utf8) {
        names_.push_back({utf8, kNever});
        return static_cast<uint32_t>(names_.size() - 1);
    }
    void name(uint32_t index) {
        Name& name = names_[index];
        if (name.number != kNever) return again(name.number);
        text(name.text);
        name.number = remember();
    }

    void begin_list() { out_.append("]("); }
    void end_list() { put('e'); }
    void begin_dict() { out_.append("}("); }
    void end_dict() { put('u'); }
    void begin_tuple() { put('('); }
    void end_tuple() { put('t'); }
    void pair(uint64_t first, uint64_t second) {
        number(first);
        number(second);
        put('\x86');
    }
    // Ends a batch after every 1000 items, so that a reader can append it to the list and need not hold all of them.
    void next_item(size_t i) {
        if (i && i % 1000 == 0) out_.append("e(");
    }
    void end() { put('.'); }

private:
    static constexpr uint32_t kNever = 0xFFFFFFFF;
    struct Name {
        std::string text;
        uint32_t number;
    };

    std::string out_;
    std::vector<Name> names_;
    uint32_t remembered_ = 0;

    void put(char byte) { out_.push_back(byte); }
    void append(uint64_t value, size_t count) {     // the lowest byte first
        char bytes[8];
        for (size_t i = 0; i < 8; ++i) bytes[i] = static_cast<char>(value >> (8 * i));
        out_.append(bytes, count);
    }
    void put_bytes(char operation, uint64_t value, size_t count) {
        put(operation);
        append(value, count);
    }
};

}  // namespace bfc

/*
 * Reads the events of a trace from its JSON text, without a Python object for each event.
 *
 * The text may come from a stranger. Every function that reads the text gets a `struct text`, and
 * compares the position with the end before it reads a byte. No function is recursive. Memory is at
 * most a small multiple of the text.
 *
 * If this code does not understand a text, `scan` returns None, and the caller decodes the text
 * with msgspec. So msgspec must accept every text that is accepted here, and give the same result.
 * Strings are an exception: only their quotes, escapes and control characters are checked here.
 * Strings that are kept are decoded later, in Python.
 *
 * The numbers of each event with a duration, and of each memory event, become a row. The other
 * values that are kept (name, category, thread, grid and so on) repeat between events. They are
 * copied into a short event in JSON, the kind of the event. The row has the position of this kind.
 * Long texts (shapes, types, stacks) are numbered separately. As parts of a kind, they would
 * multiply the number of kinds.
 *
 * A trace is read in pieces. A `Scanner` reads one piece at a time, without the GIL; several scanners
 * read several pieces at once. `Columns.add` gives the rows of a piece the positions of their texts
 * and kinds among those of all pieces. The caller then checks the new kinds, and calls
 * `Columns.keep`, which appends the rows. Without `keep`, the next `add` drops the piece. As pieces
 * are added in the order of the file, the result is the same for any number of scanners.
 * `Columns.take` returns the columns and the texts, and starts again.
 */

#ifndef WITHOUT_PYTHON
#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#endif

#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* Durations and start times are exact below these limits, both here and in Python. */
#define LONGEST_US ((uint64_t)1 << 43)
#define LATEST_US (((uint64_t)1 << 62) / 1000)
#define MOST_DEPTH 64 /* the deepest nesting of lists and objects; a uint64_t has a bit for each */
#ifndef FIRST_SLOTS
#define FIRST_SLOTS 512 /* slots of a new table; fuzzing uses fewer, so that tables grow */
#endif
#define MOST_PROBES 1024 /* slots to try for one text; only texts made to collide need more */
#define MOST_KEYS 64 /* the limit of the keys in a `struct keys` */
#define START MOST_KEYS /* stands for the previous member if there is none */
#define LONGEST_STEP 64 /* bytes of a step (see `take_member`); a longer one is not kept */
#define MOST_BYTES ((size_t)1 << 30) /* of one piece, and slots of a table: counts are int32_t */
#ifndef MOST_HELD
#define MOST_HELD ((size_t)1 << 23) /* bytes of texts; a scanner that holds more forgets all */
#endif

struct text {
    const char *at, *end;
};

struct slice {
    const char *begin;
    size_t size;
};

/* ---- Memory that grows ---- */

struct buffer {
    char *data;
    size_t size, capacity;
};

/* Makes room for `size` more bytes; false if there is not enough memory. */
static bool reserve(struct buffer *buffer, size_t size)
{
    if (size <= buffer->capacity - buffer->size)
        return true;
    if (size > SIZE_MAX / 4 - buffer->size)
        return false;
    size_t capacity = 2 * (buffer->size + size) + 4096;
    char *data = realloc(buffer->data, capacity);
    if (data == NULL)
        return false;
    buffer->data = data;
    buffer->capacity = capacity;
    return true;
}

static bool append(struct buffer *buffer, const void *data, size_t size)
{
    if (!reserve(buffer, size))
        return false;
    if (size > 0)
        memcpy(buffer->data + buffer->size, data, size);
    buffer->size += size;
    return true;
}

/* Appends an item of a list or object, and a comma. */
static bool append_item(struct buffer *buffer, const char *begin, const char *end)
{
    size_t size = (size_t)(end - begin);
    if (!reserve(buffer, size + 1))
        return false;
    memcpy(buffer->data + buffer->size, begin, size);
    buffer->data[buffer->size + size] = ',';
    buffer->size += size + 1;
    return true;
}

/* ---- Tables: distinct texts in the order of their first use ---- */

struct entry {
    uint64_t hash;
    size_t begin, size; /* of the text in `texts` */
};

struct table {
    struct buffer texts, entries;
    int32_t count, kept; /* the entries after the first `kept` are those of the current piece */
    int32_t *slots; /* each has the position of an entry plus 1; 0 if the slot is free */
    size_t slot_count; /* a power of two, at least twice `count` */
};

static bool is_word_equal(const char *a, const char *b)
{
    uint64_t words[2];
    memcpy(&words[0], a, 8);
    memcpy(&words[1], b, 8);
    return words[0] == words[1];
}

/* Like `memcmp(a, b, size) == 0`, but faster for short texts. */
static bool is_equal(const char *a, const char *b, size_t size)
{
    if (size >= 8) {
        for (size_t k = 0; k + 8 < size; k += 8)
            if (!is_word_equal(a + k, b + k))
                return false;
        return is_word_equal(a + size - 8, b + size - 8);
    }
    for (size_t k = 0; k < size; k++)
        if (a[k] != b[k])
            return false;
    return true;
}

static uint64_t mixed(uint64_t hash, uint64_t word)
{
    hash = (hash ^ word) * UINT64_C(0x9E3779B97F4A7C15);
    return hash ^ (hash >> 32);
}

static uint64_t hash_of(const char *data, size_t size)
{
    uint64_t hash = size, word = 0;
    for (; size >= 8; data += 8, size -= 8) {
        memcpy(&word, data, 8);
        hash = mixed(hash, word);
    }
    word = 0;
    memcpy(&word, data, size);
    return mixed(hash, word);
}

/* Doubles the slots of a table; false if memory is not enough or a text needs too many probes. */
static bool grow(struct table *table)
{
    size_t slot_count = table->slot_count ? 2 * table->slot_count : FIRST_SLOTS;
    int32_t *slots = slot_count > MOST_BYTES ? NULL : calloc(slot_count, sizeof *slots);
    if (slots == NULL)
        return false;
    const struct entry *entries = (const struct entry *)table->entries.data;
    for (int32_t k = 0; k < table->count; k++) {
        size_t slot = entries[k].hash & (slot_count - 1);
        for (int probes = 0; slots[slot] != 0; slot = (slot + 1) & (slot_count - 1))
            if (++probes > MOST_PROBES) {
                free(slots);
                return false;
            }
        slots[slot] = k + 1;
    }
    free(table->slots);
    table->slots = slots;
    table->slot_count = slot_count;
    return true;
}

/* Returns the position of a text in a table, and adds the text if it is new; -1 if memory is not
 * enough or the text needs too many probes. */
static int32_t code_of(struct table *table, const char *data, size_t size)
{
    if (2 * ((size_t)table->count + 1) > table->slot_count && !grow(table))
        return -1;
    uint64_t hash = hash_of(data, size);
    const struct entry *entries = (const struct entry *)table->entries.data;
    size_t slot = hash & (table->slot_count - 1);
    for (int probes = 0; table->slots[slot] != 0; slot = (slot + 1) & (table->slot_count - 1)) {
        const struct entry *entry = &entries[table->slots[slot] - 1];
        if (entry->hash == hash && entry->size == size
            && is_equal(table->texts.data + entry->begin, data, size))
            return table->slots[slot] - 1;
        if (++probes > MOST_PROBES)
            return -1;
    }
    struct entry entry = {hash, table->texts.size, size};
    if (!append(&table->texts, data, size) || !append(&table->entries, &entry, sizeof entry))
        return -1;
    table->slots[slot] = ++table->count;
    return table->count - 1;
}

/* Removes the entries after the first `kept`. An entry is put into the first free slot, so no search
 * for an earlier entry passes the slots of later ones. */
static void forget_new(struct table *table)
{
    const struct entry *entries = (const struct entry *)table->entries.data;
    const struct entry *last = table->kept > 0 ? &entries[table->kept - 1] : NULL;
    table->texts.size = last != NULL ? last->begin + last->size : 0;
    table->entries.size = (size_t)table->kept * sizeof *entries;
    for (size_t slot = 0; table->count > table->kept && slot < table->slot_count; slot++)
        if (table->slots[slot] > table->kept)
            table->slots[slot] = 0;
    table->count = table->kept;
}

static void free_table(struct table *table)
{
    free(table->texts.data);
    free(table->entries.data);
    free(table->slots);
    *table = (struct table){0};
}

/* ---- What is read ---- */

/* The numbers of an event with a duration, and of a memory event, in the order of their rows. */
enum {
    BEGIN, END, EXTERNAL, CORRELATION, SEQUENCE, FORWARD, PYTHON_ID, PYTHON_PARENT,
    SPAN_NUMBERS
};
enum { TIME, BYTES, DEVICE_TYPE, DEVICE_ID, ALLOCATED, RESERVED, ADDRESS, MEMORY_NUMBERS };
/* The tables: of the long texts, and of the kinds. Instant events without a row have kinds too,
 * because Python checks them. */
enum { SHAPES, CONCRETE, TYPES, CALL_STACK, TEXTS };
enum { SPAN_KINDS = TEXTS, MEMORY_KINDS, OTHER_KINDS, TABLES };
enum { MERGED_TABLES = OTHER_KINDS };

/* The rows. The codes are positions in tables; a text is -1 if missing. */
struct span {
    int64_t numbers[SPAN_NUMBERS];
    int32_t texts[TEXTS], kind, unused;
};

struct memory {
    int64_t numbers[MEMORY_NUMBERS];
    int32_t kind, unused;
};

/* The text that was last read between two values of an object; see `take_member`. */
struct step {
    const char *text;
    size_t size, key; /* the key begins `key` bytes after the start of `text` */
    uint8_t member;
};

struct scanner {
    struct table tables[TABLES];
    struct buffer codes[MERGED_TABLES]; /* see `merge`; -1 if not known */
    uint64_t generation; /* of the `struct merged` to which the codes belong */
    bool are_codes_kept;
    /* Of the current piece: */
    int64_t recorded, counters; /* the number of all events, and of those with the phase C */
    struct buffer spans, memory; /* rows */
    struct buffer head, args; /* the two parts of the kind of the current event */
    struct step event_steps[MOST_KEYS + 1], args_steps[MOST_KEYS + 1];
};

/* One event while it is read. */
struct event {
    int64_t span[SPAN_NUMBERS], memory[MEMORY_NUMBERS], duration, old_external;
    struct slice texts[TEXTS];
    char phase;
    bool has_phase, has_args, has_bytes, has_duration;
    bool is_odd; /* a number has another type than expected */
};

/* ---- Keys ---- */

enum what {
    SKIPPED, PHASE, ARGS, START_TIME, DURATION, KEPT, SPAN_NUMBER, MEMORY_NUMBER, OLD_EXTERNAL,
    TEXT
};

struct member {
    const char *key;
    enum what what;
    int which;
    int64_t missing; /* the number that replaces null */
};

/* The first member of each list stands for all keys that are not in the list. */
static const struct member EVENT_MEMBERS[] = {
    {"", SKIPPED, 0, 0},
    {"ph", PHASE, 0, 0}, {"cat", KEPT, 0, 0}, {"name", KEPT, 0, 0},
    {"pid", KEPT, 0, 0}, {"tid", KEPT, 0, 0},
    {"ts", START_TIME, 0, 0}, {"dur", DURATION, 0, 0},
    {"args", ARGS, 0, 0},
};

static const struct member ARGS_MEMBERS[] = {
    {"", SKIPPED, 0, 0},
    {"External id", SPAN_NUMBER, EXTERNAL, 0},
    {"external id", OLD_EXTERNAL, 0, 0},
    {"correlation", SPAN_NUMBER, CORRELATION, 0},
    {"Sequence number", SPAN_NUMBER, SEQUENCE, -1},
    {"Fwd thread id", SPAN_NUMBER, FORWARD, 0},
    {"Python id", SPAN_NUMBER, PYTHON_ID, -1},
    {"Python parent id", SPAN_NUMBER, PYTHON_PARENT, -1},
    {"Input Dims", TEXT, SHAPES, 0},
    {"Concrete Inputs", TEXT, CONCRETE, 0},
    {"Input type", TEXT, TYPES, 0},
    {"Call stack", TEXT, CALL_STACK, 0},
    {"Bytes", MEMORY_NUMBER, BYTES, 0},
    {"Device Type", MEMORY_NUMBER, DEVICE_TYPE, 0},
    {"Device Id", MEMORY_NUMBER, DEVICE_ID, -1},
    {"Total Allocated", MEMORY_NUMBER, ALLOCATED, 0},
    {"Total Reserved", MEMORY_NUMBER, RESERVED, 0},
    {"Addr", MEMORY_NUMBER, ADDRESS, 0},
    {"finished", KEPT, 0, 0}, {"bytes", KEPT, 0, 0}, {"size", KEPT, 0, 0},
    {"direction", KEPT, 0, 0}, {"grid", KEPT, 0, 0}, {"block", KEPT, 0, 0},
    {"blocks per SM", KEPT, 0, 0}, {"est. achieved occupancy %", KEPT, 0, 0},
    {"Collective name", KEPT, 0, 0}, {"dtype", KEPT, 0, 0},
    {"In msg nelems", KEPT, 0, 0}, {"Out msg nelems", KEPT, 0, 0},
    {"Process Group Ranks", KEPT, 0, 0}, {"Group size", KEPT, 0, 0},
    {"Process Group Name", KEPT, 0, 0}, {"Process Group Description", KEPT, 0, 0},
    {"Seq", KEPT, 0, 0}, {"Src Rank", KEPT, 0, 0}, {"Dst Rank", KEPT, 0, 0},
    {"graph id", KEPT, 0, 0}, {"graph node id", KEPT, 0, 0},
    {"cuda_sync_kind", KEPT, 0, 0}, {"wait_on_cuda_event_record_corr_id", KEPT, 0, 0},
    {"wait_on_stream", KEPT, 0, 0}, {"wait_on_cuda_event_id", KEPT, 0, 0},
    {"kernel", KEPT, 0, 0}, {"name", KEPT, 0, 0}, {"str", KEPT, 0, 0},
    {"annotation", KEPT, 0, 0},
    /* These keys are frequent. They are listed only because listed keys are recognised faster. */
    {"Ev Idx", SKIPPED, 0, 0}, {"Record function id", SKIPPED, 0, 0},
    {"Input Strides", SKIPPED, 0, 0}, {"cbid", SKIPPED, 0, 0},
    {"device", SKIPPED, 0, 0}, {"context", SKIPPED, 0, 0}, {"stream", SKIPPED, 0, 0},
};

#define COUNT(array) (sizeof(array) / sizeof(array)[0])
#define KEY_SLOTS 256 /* at least twice the number of keys */

struct keys {
    const struct member *members;
    uint8_t sizes[MOST_KEYS];
    uint8_t slots[KEY_SLOTS]; /* positions of members; 0 if free */
};

static struct keys event_keys, args_keys;

static uint8_t key_slot(const char *key, size_t size)
{
    return (uint8_t)(size * 31 + (uint8_t)key[0] * 7 + (uint8_t)key[size - 1] * 13
                     + (uint8_t)key[size / 2]);
}

static void prepare(struct keys *keys, const struct member *members, size_t count)
{
    keys->members = members;
    for (size_t k = 1; k < count; k++) {
        size_t size = strlen(members[k].key);
        uint8_t slot = key_slot(members[k].key, size);
        while (keys->slots[slot] != 0 && keys->slots[slot] != k)
            slot++;
        keys->slots[slot] = (uint8_t)k;
        keys->sizes[k] = (uint8_t)size;
    }
}

static void prepare_keys(void)
{
    prepare(&event_keys, EVENT_MEMBERS, COUNT(EVENT_MEMBERS));
    prepare(&args_keys, ARGS_MEMBERS, COUNT(ARGS_MEMBERS));
}

/* The position of a key; 0 if it is not known. */
static uint8_t position_of(const struct keys *keys, struct slice key)
{
    if (key.size == 0)
        return 0;
    for (uint8_t slot = key_slot(key.begin, key.size); keys->slots[slot] != 0; slot++) {
        uint8_t k = keys->slots[slot];
        if (keys->sizes[k] == key.size && is_equal(keys->members[k].key, key.begin, key.size))
            return k;
    }
    return 0;
}

/* ---- JSON ---- */

static bool is_digit(char c)
{
    return (unsigned char)(c - '0') < 10;
}

/* Whether the next byte is `c`. */
static bool is_next(const struct text *text, char c)
{
    return text->at < text->end && *text->at == c;
}

static void skip_blanks(struct text *text)
{
    const char *at = text->at, *end = text->end;
    while (at < end && (*at == ' ' || *at == '\n' || *at == '\r' || *at == '\t'))
        at++;
    text->at = at;
}

/* Skips blanks, and the byte after them if it is `c`; returns whether that byte was skipped. */
static bool take(struct text *text, char c)
{
    skip_blanks(text);
    if (!is_next(text, c))
        return false;
    text->at++;
    return true;
}

/* Skips the rest of an escape after its backslash. False if it is no escape, or half of a surrogate
 * pair. */
static bool take_escape(struct text *text)
{
    if (text->at == text->end)
        return false;
    char c = *text->at++;
    if (c != 'u')
        return c != '\0' && strchr("\"\\/bfnrt", c) != NULL;
    if (text->end - text->at < 4)
        return false;
    for (int k = 0; k < 4; k++)
        if (!is_digit(text->at[k]) && (text->at[k] == '\0' || !strchr("abcdefABCDEF", text->at[k])))
            return false;
    bool is_half = (text->at[0] | 0x20) == 'd' && text->at[1] >= '8';
    text->at += 4;
    return !is_half;
}

/* In a mask, the number of bytes before the first byte that is not 0. */
static int bytes_before(uint64_t mask)
{
#if defined(__GNUC__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    return __builtin_ctzll(mask) / 8;
#else
    return mask == 0; /* the number is not known: 0, so that the caller looks at each byte */
#endif
}

/* Skips the bytes of a string before its next quote, backslash or control character. */
static void skip_plain(struct text *text)
{
    const uint64_t each = UINT64_C(0x0101010101010101), high = each * 0x80;
    const char *at = text->at, *end = text->end;
    for (; end - at >= 8; at += 8) {
        uint64_t word, quote, escape, special;
        memcpy(&word, at, 8);
        quote = word ^ (each * '"');
        escape = word ^ (each * '\\');
        /* Marks the first quote, backslash or byte below 0x20, and perhaps bytes after it. */
        special = (((quote - each) & ~quote) | ((escape - each) & ~escape)
                   | ((word - each * 0x20) & ~word))
            & high;
        if (special != 0) {
            at += bytes_before(special);
            break;
        }
    }
    while (at < end && *at != '"' && *at != '\\' && (unsigned char)*at >= 0x20)
        at++;
    text->at = at;
}

/* Reads a string; `inside` gets the text between the quotes. False if the string has a control
 * character or a bad escape, or does not end. Bytes that are not UTF-8 are accepted. */
static bool take_string(struct text *text, struct slice *inside, bool *has_escape)
{
    if (!is_next(text, '"'))
        return false;
    inside->begin = ++text->at;
    *has_escape = false;
    for (;;) {
        skip_plain(text);
        if (text->at == text->end)
            return false;
        char c = *text->at++;
        if (c == '"') {
            inside->size = (size_t)(text->at - 1 - inside->begin);
            return true;
        }
        *has_escape = true;
        if (c != '\\' || !take_escape(text))
            return false;
    }
}

static bool take_digits(struct text *text)
{
    const char *at = text->at;
    while (at < text->end && is_digit(*at))
        at++;
    bool found = at > text->at;
    text->at = at;
    return found;
}

/* Skips a number in any form that JSON allows. */
static bool take_number(struct text *text)
{
    if (is_next(text, '-'))
        text->at++;
    if (is_next(text, '0'))
        text->at++;
    else if (!take_digits(text))
        return false;
    if (is_next(text, '.')) {
        text->at++;
        if (!take_digits(text))
            return false;
    }
    if (is_next(text, 'e') || is_next(text, 'E')) {
        text->at++;
        if (is_next(text, '+') || is_next(text, '-'))
            text->at++;
        return take_digits(text);
    }
    return true;
}

static bool take_word(struct text *text, const char *word)
{
    size_t size = strlen(word);
    if ((size_t)(text->end - text->at) < size || memcmp(text->at, word, size) != 0)
        return false;
    text->at += size;
    return true;
}

/* Skips a string, a number, true, false or null. */
static bool take_scalar(struct text *text)
{
    struct slice inside;
    bool has_escape;
    if (text->at == text->end)
        return false;
    switch (*text->at) {
    case '"':
        return take_string(text, &inside, &has_escape);
    case 't':
        return take_word(text, "true");
    case 'f':
        return take_word(text, "false");
    case 'n':
        return take_word(text, "null");
    default:
        return take_number(text);
    }
}

/* Skips a key, its colon and the blanks after it; `key` gets the text of the key. False also if the
 * key has an escape, because it may then be another spelling of a known key. */
static bool take_key(struct text *text, struct slice *key)
{
    bool has_escape;
    skip_blanks(text);
    if (!take_string(text, key, &has_escape) || has_escape || !take(text, ':'))
        return false;
    skip_blanks(text);
    return true;
}

/* Parses the text before the value of the next member, which becomes the step. If there is no
 * further member, returns false and does not move. */
static bool take_step(struct text *text, const struct keys *keys, uint8_t last, struct step *step)
{
    const char *begin = text->at;
    struct slice key;
    if (!take(text, last == START ? '{' : ',') || !take_key(text, &key)) {
        text->at = begin;
        return false;
    }
    size_t size = (size_t)(text->at - begin);
    *step = (struct step){begin, size <= LONGEST_STEP ? size : 0, (size_t)(key.begin - 1 - begin),
                          position_of(keys, key)};
    return true;
}

/* Moves to the value of the next member of an object: over a comma (for the first member, over the
 * opening brace), the key and its colon. If there is no further member, returns false and does not
 * move.
 *
 * `last` is the position of the previous member, START if there is none. It becomes the position
 * of the next member, and `key` becomes the start of the key. The members of most objects come in
 * the same order, with the same blanks. So `steps` keeps the text that last followed each member.
 * If the same text follows again, it is not parsed again. */
static inline bool take_member(struct text *text, const struct keys *keys, struct step *steps,
                               uint8_t *last, const char **key)
{
    const char *begin = text->at;
    struct step *step = &steps[*last];
    if (step->size > 0 && (size_t)(text->end - begin) >= step->size
        && is_equal(begin, step->text, step->size)) {
        text->at += step->size;
        skip_blanks(text); /* there may be more blanks than the last time */
    } else if (!take_step(text, keys, *last, step)) {
        return false;
    }
    *key = begin + step->key;
    *last = step->member;
    return true;
}

/* Skips the brace that ends an object; `last` is the position of the object's last member. If it is
 * START, the object is empty, and its opening brace is skipped too. */
static bool take_end(struct text *text, uint8_t last)
{
    return (last != START || take(text, '{')) && take(text, '}');
}

/* Skips a list or an object. False if lists and objects are nested too deeply. */
static bool take_nested(struct text *text)
{
    uint64_t is_object = 0; /* the lowest bit is for the innermost list or object */
    int depth = 0;
    struct slice key;
    for (;;) {
        /* A value begins here. */
        bool opens = is_next(text, '{') || is_next(text, '[');
        if (opens) {
            if (++depth > MOST_DEPTH)
                return false;
            is_object = is_object << 1 | (*text->at++ == '{');
            if (!take(text, is_object & 1 ? '}' : ']')) {
                if (is_object & 1 ? !take_key(text, &key) : false)
                    return false;
                continue;
            }
            depth--;
            is_object >>= 1;
        } else if (!take_scalar(text)) {
            return false;
        }
        /* A value ends here, and perhaps lists and objects around it. */
        while (depth > 0 && !take(text, ',')) {
            if (!take(text, is_object & 1 ? '}' : ']'))
                return false;
            depth--;
            is_object >>= 1;
        }
        if (depth == 0)
            return true;
        if (is_object & 1) {
            if (!take_key(text, &key))
                return false;
        } else {
            skip_blanks(text);
        }
    }
}

/* Skips any value. */
static bool take_value(struct text *text)
{
    return is_next(text, '{') || is_next(text, '[') ? take_nested(text) : take_scalar(text);
}

/* Reads digits into a number; false without digits, with a leading 0, or with more than 64 bits. */
static bool read_digits(struct text *text, uint64_t *value)
{
    const char *begin = text->at, *at = begin, *end = text->end;
    uint64_t number = 0;
    for (; at < end && is_digit(*at); at++) {
        uint64_t digit = (uint64_t)(*at - '0');
        if (at - begin >= 19 && number > (UINT64_MAX - digit) / 10)
            return false;
        number = number * 10 + digit;
    }
    text->at = at;
    *value = number;
    return at > begin && (*begin != '0' || at == begin + 1);
}

/* Reads an integer, or `missing` for null. The result has the lower 64 bits of the integer. False
 * for other values, and if the integer without its sign has more than 64 bits. */
static bool read_integer(struct text *text, int64_t *value, int64_t missing)
{
    uint64_t digits;
    if (take_word(text, "null")) {
        *value = missing;
        return true;
    }
    bool is_negative = is_next(text, '-');
    text->at += is_negative;
    if (!read_digits(text, &digits))
        return false;
    if (is_next(text, '.') || is_next(text, 'e') || is_next(text, 'E'))
        return false;
    digits = is_negative ? 0 - digits : digits;
    memcpy(value, &digits, sizeof *value);
    return true;
}

/* Reads decimal microseconds as nanoseconds. False if the time is not below the limit, or has more
 * than three decimals or an exponent. */
static bool read_time(struct text *text, int64_t *ns, uint64_t limit_us)
{
    static const int64_t scales[] = {1000, 100, 10, 1};
    uint64_t whole, fraction = 0;
    size_t decimals = 0;
    bool is_negative = is_next(text, '-');
    text->at += is_negative;
    if (!read_digits(text, &whole) || whole >= limit_us)
        return false;
    if (is_next(text, '.')) {
        const char *begin = ++text->at;
        for (; text->at < text->end && is_digit(*text->at) && text->at - begin < 3; text->at++)
            fraction = fraction * 10 + (uint64_t)(*text->at - '0');
        decimals = (size_t)(text->at - begin);
        if (decimals == 0)
            return false;
    }
    if (text->at < text->end && (is_digit(*text->at) || *text->at == 'e' || *text->at == 'E'))
        return false;
    *ns = (int64_t)whole * 1000 + (int64_t)fraction * scales[decimals];
    *ns = is_negative ? -*ns : *ns;
    return true;
}

/* ---- Events ---- */

/* Reads the value of a member that is a number of a row. */
static bool read_number(struct text *text, struct event *event, const struct member *member)
{
    switch (member->what) {
    case START_TIME:
        return read_time(text, &event->span[BEGIN], LATEST_US);
    case DURATION:
        event->has_duration = true;
        return read_time(text, &event->duration, LONGEST_US);
    case OLD_EXTERNAL:
        return read_integer(text, &event->old_external, member->missing);
    case SPAN_NUMBER:
        return read_integer(text, &event->span[member->which], member->missing);
    default:
        if (member->which == BYTES)
            event->has_bytes = !is_next(text, 'n');
        return read_integer(text, &event->memory[member->which], member->missing);
    }
}

/* Reads the value of a member. False if the value is not JSON. A number of another type than
 * expected sets `is_odd`. A member that is part of the kind is appended to `kind`, with its key. */
static bool read_member(struct text *text, struct event *event, const struct member *member,
                        const char *key, struct buffer *kind)
{
    const char *begin = text->at;
    switch (member->what) {
    case SKIPPED:
        return take_value(text);
    case PHASE:
    case KEPT:
        return take_value(text) && append_item(kind, key, text->at);
    case TEXT:
        if (!take_value(text))
            return false;
        event->texts[member->which] = (struct slice){begin, (size_t)(text->at - begin)};
        return true;
    default:
        if (read_number(text, event, member))
            return true;
        event->is_odd = true;
        text->at = begin;
        return take_value(text);
    }
}

/* Reads the phase of an event, one character between quotes. */
static bool read_phase(const struct text *text, struct event *event)
{
    if (text->end - text->at < 3 || text->at[0] != '"' || text->at[2] != '"' || event->has_phase)
        return false;
    event->phase = text->at[1];
    event->has_phase = true;
    return true;
}

/* Reads the arguments of an event. False if they are no object, or the event has them twice. */
static bool read_args(struct text *text, struct scanner *scanner, struct event *event)
{
    const char *key;
    uint8_t last = START;
    if (event->has_args)
        return false;
    event->has_args = true;
    while (take_member(text, &args_keys, scanner->args_steps, &last, &key))
        if (!read_member(text, event, &ARGS_MEMBERS[last], key, &scanner->args))
            return false;
    return take_end(text, last);
}

/* Reads the members of an event. False if the event has no phase, or two phases. */
static bool read_event(struct text *text, struct scanner *scanner, struct event *event)
{
    const char *key;
    uint8_t last = START;
    while (take_member(text, &event_keys, scanner->event_steps, &last, &key)) {
        const struct member *member = &EVENT_MEMBERS[last];
        if (member->what == PHASE && !read_phase(text, event))
            return false;
        if (member->what == ARGS ? !read_args(text, scanner, event)
                                 : !read_member(text, event, member, key, &scanner->head))
            return false;
    }
    return event->has_phase && take_end(text, last);
}

/* Returns the position of the current event's kind in a table; -1 if memory is not enough or the
 * kind needs too many probes. A kind ends with a comma, so that all kinds are the items of a list. */
static int32_t kind_of(struct scanner *scanner, int table)
{
    static const char opens[] = "\"args\":{";
    struct buffer *head = &scanner->head, *args = &scanner->args;
    if (args->size > 1)
        args->size--; /* without the comma after the last member */
    if (!append(head, opens, sizeof opens - 1) || !append(head, args->data, args->size)
        || !append(head, "}},", 3))
        return -1;
    return code_of(&scanner->tables[table], head->data, head->size);
}

/* Adds the row of an event with a duration. */
static bool add_span(struct scanner *scanner, const struct event *event)
{
    struct span row = {.kind = kind_of(scanner, SPAN_KINDS)};
    bool found = row.kind >= 0;
    memcpy(row.numbers, event->span, sizeof row.numbers);
    row.numbers[END] = event->span[BEGIN] + event->duration;
    if (row.numbers[EXTERNAL] == 0)
        row.numbers[EXTERNAL] = event->old_external;
    for (int k = 0; k < TEXTS; k++) {
        struct slice value = event->texts[k];
        row.texts[k] = value.size ? code_of(&scanner->tables[k], value.begin, value.size) : -1;
        found = found && (row.texts[k] >= 0 || value.size == 0);
    }
    return found && append(&scanner->spans, &row, sizeof row);
}

/* Adds the row of an event without a duration, if it is a memory event. */
static bool add_instant(struct scanner *scanner, const struct event *event)
{
    if (!event->has_bytes)
        return kind_of(scanner, OTHER_KINDS) >= 0;
    struct memory row = {.kind = kind_of(scanner, MEMORY_KINDS)};
    memcpy(row.numbers, event->memory, sizeof row.numbers);
    row.numbers[TIME] = event->span[BEGIN];
    return row.kind >= 0 && append(&scanner->memory, &row, sizeof row);
}

/* Reads one event and adds it. False if the event is not understood or memory is not enough. */
static bool scan_event(struct text *text, struct scanner *scanner)
{
    struct event event = {.span = {[SEQUENCE] = -1, [PYTHON_ID] = -1, [PYTHON_PARENT] = -1},
                          .memory = {[DEVICE_ID] = -1}};
    scanner->head.size = scanner->args.size = 0;
    if (!append(&scanner->head, "{", 1) || !read_event(text, scanner, &event))
        return false;
    scanner->recorded++;
    switch (event.phase) {
    case 'X':
        return !event.is_odd && event.has_duration && add_span(scanner, &event);
    case 'i':
        return !event.is_odd && add_instant(scanner, &event);
    case 'C':
        scanner->counters++;
        return true;
    default:
        return event.phase != '\0' && strchr("BEIbneSTpFstfPNODMVvRc()", event.phase) != NULL;
    }
}

/* Drops the current piece, except for what was kept of it. */
static void restart(struct scanner *scanner)
{
    for (int k = 0; k < TABLES; k++)
        forget_new(&scanner->tables[k]);
    scanner->recorded = scanner->counters = 0;
    scanner->spans.size = scanner->memory.size = 0;
    /* The steps point into the text of the last piece. */
    memset(scanner->event_steps, 0, sizeof scanner->event_steps);
    memset(scanner->args_steps, 0, sizeof scanner->args_steps);
}

/* The bytes that the texts of tables take. */
static size_t held_by(const struct table *tables, int count)
{
    size_t held = 0;
    for (int k = 0; k < count; k++)
        held += tables[k].texts.size + tables[k].entries.size;
    return held;
}

/* Reads the next piece: events with commas between them, to the end of the text. */
static bool scan_piece(struct text text, struct scanner *scanner)
{
    if (held_by(scanner->tables, TABLES) > MOST_HELD) {
        scanner->generation = 0;
        for (int k = 0; k < TABLES; k++)
            free_table(&scanner->tables[k]);
    }
    restart(scanner);
    do {
        skip_blanks(&text);
        if (!scan_event(&text, scanner))
            return false;
    } while (take(&text, ','));
    skip_blanks(&text);
    return text.at == text.end;
}

static void free_scanner(struct scanner *scanner)
{
    struct buffer *buffers[] = {&scanner->spans, &scanner->memory, &scanner->head, &scanner->args};
    for (size_t k = 0; k < COUNT(buffers); k++)
        free(buffers[k]->data);
    for (int k = 0; k < TABLES; k++)
        free_table(&scanner->tables[k]);
    for (int k = 0; k < MERGED_TABLES; k++)
        free(scanner->codes[k].data);
}

/* ---- The texts and kinds of all pieces ---- */

struct merged {
    struct table tables[MERGED_TABLES];
    uint64_t generation; /* not 0; another after each `restart_merged` */
};

/* Replaces the position of a text in a table of a scanner by that in the table of all pieces. */
static bool merge_code(struct merged *merged, struct scanner *scanner, int table, int32_t *code)
{
    const struct entry *entries = (const struct entry *)scanner->tables[table].entries.data;
    int32_t *known = (int32_t *)scanner->codes[table].data + *code;
    if (*known < 0)
        *known = code_of(&merged->tables[table],
                         scanner->tables[table].texts.data + entries[*code].begin,
                         entries[*code].size);
    *code = *known;
    return *code >= 0;
}

/* Makes room for the codes of all texts of a scanner, those that are new being -1. */
static bool extend_codes(const struct merged *merged, struct scanner *scanner)
{
    bool are_known = scanner->are_codes_kept && scanner->generation == merged->generation;
    scanner->generation = merged->generation;
    scanner->are_codes_kept = false;
    for (int k = 0; k < MERGED_TABLES; k++) {
        struct buffer *codes = &scanner->codes[k];
        size_t size = (size_t)scanner->tables[k].count * sizeof(int32_t);
        size_t before = !are_known ? 0 : codes->size < size ? codes->size : size;
        codes->size = before;
        if (!reserve(codes, size - before))
            return false;
        if (size > before)
            memset(codes->data + before, 0xFF, size - before);
        codes->size = size;
    }
    return true;
}

/* Gives the rows of the scanner's piece their positions in the tables of all pieces. What an earlier
 * piece added that was not kept is dropped. False if memory is not enough or a text needs too many
 * probes; the piece is then dropped by the next call. */
static bool merge(struct merged *merged, struct scanner *scanner)
{
    struct span *spans = (struct span *)scanner->spans.data;
    struct memory *memory = (struct memory *)scanner->memory.data;
    size_t span_count = scanner->spans.size / sizeof *spans;
    size_t memory_count = scanner->memory.size / sizeof *memory;
    bool found = true;
    for (int k = 0; k < MERGED_TABLES; k++)
        forget_new(&merged->tables[k]);
    if (!extend_codes(merged, scanner))
        return false;
    for (size_t row = 0; found && row < span_count; row++) {
        found = merge_code(merged, scanner, SPAN_KINDS, &spans[row].kind);
        for (int k = 0; found && k < TEXTS; k++)
            found = spans[row].texts[k] < 0 || merge_code(merged, scanner, k, &spans[row].texts[k]);
    }
    for (size_t row = 0; found && row < memory_count; row++)
        found = merge_code(merged, scanner, MEMORY_KINDS, &memory[row].kind);
    return found;
}

/* Keeps the texts and kinds of the piece that was merged last, but not its rows, which the caller
 * has copied. */
static void keep_merged(struct merged *merged, struct scanner *scanner)
{
    for (int k = 0; k < MERGED_TABLES; k++)
        merged->tables[k].kept = merged->tables[k].count;
    for (int k = 0; k < TABLES; k++)
        scanner->tables[k].kept = scanner->tables[k].count;
    scanner->are_codes_kept = true;
    restart(scanner);
}

/* Forgets all texts and kinds. */
static void restart_merged(struct merged *merged)
{
    static uint64_t generations = 0; /* the caller holds the GIL */
    for (int k = 0; k < MERGED_TABLES; k++)
        free_table(&merged->tables[k]);
    merged->generation = ++generations;
}

#ifndef WITHOUT_PYTHON

/* ---- Columns ---- */

/* The values of a column. While all values are equal, only one is stored. */
struct column {
    PyObject *values; /* a bytearray, because numpy can use its memory without a copy */
    size_t capacity; /* in bytes */
    bool is_varied;
};

/* Each row has some numbers of 8 bytes, and after them some codes of 4 bytes. */
#define MOST_COLUMNS (SPAN_NUMBERS + TEXTS + 1)
struct columns {
    size_t numbers, codes, row_size, row_count;
    struct column columns[MOST_COLUMNS];
};

static const struct columns NO_SPANS = {SPAN_NUMBERS, TEXTS + 1, sizeof(struct span), 0, {{0}}};
static const struct columns NO_MEMORY = {MEMORY_NUMBERS, 1, sizeof(struct memory), 0, {{0}}};

/* Makes room for `size` bytes in all; false, with an exception, if there is not enough memory. */
static bool make_room(struct column *column, size_t size)
{
    if (size <= column->capacity)
        return true;
    Py_ssize_t capacity = (Py_ssize_t)(2 * size);
    if (column->values == NULL) {
        column->values = PyByteArray_FromStringAndSize(NULL, capacity);
        if (column->values == NULL)
            return false;
    } else if (PyByteArray_Resize(column->values, capacity) < 0) {
        return false;
    }
    column->capacity = (size_t)capacity;
    return true;
}

/* Copies values that begin `step` bytes after each other. */
static void copy_values(char *to, const char *from, size_t size, size_t step, size_t count)
{
    if (size == 8)
        for (size_t k = 0; k < count; k++)
            memcpy(to + 8 * k, from + step * k, 8);
    else
        for (size_t k = 0; k < count; k++)
            memcpy(to + 4 * k, from + step * k, 4);
}

static bool are_equal(const char *value, const char *from, size_t size, size_t step, size_t count)
{
    size_t k = 0;
    if (size == 8)
        while (k < count && memcmp(value, from + step * k, 8) == 0)
            k++;
    else
        while (k < count && memcmp(value, from + step * k, 4) == 0)
            k++;
    return k == count;
}

/* Appends the values of `count` rows, at least one, to a column of `before` values. */
static bool extend(struct column *column, size_t before, const char *from, size_t size, size_t step,
                   size_t count)
{
    char first[8];
    if (!column->is_varied) {
        memcpy(first, before > 0 ? PyByteArray_AsString(column->values) : from, size);
        bool is_varied = !are_equal(first, from, size, step, count);
        if (!make_room(column, is_varied ? size * (before + count) : size))
            return false;
        copy_values(PyByteArray_AsString(column->values), first, size, 0, is_varied ? before : 1);
        column->is_varied = is_varied;
    }
    if (!column->is_varied)
        return true;
    if (!make_room(column, size * (before + count)))
        return false;
    copy_values(PyByteArray_AsString(column->values) + size * before, from, size, step, count);
    return true;
}

static bool extend_all(struct columns *columns, const struct buffer *rows)
{
    size_t count = rows->size / columns->row_size, at = 0;
    for (size_t k = 0; count > 0 && k < columns->numbers + columns->codes; k++) {
        size_t size = k < columns->numbers ? 8 : 4;
        if (!extend(&columns->columns[k], columns->row_count, rows->data + at, size,
                    columns->row_size, count))
            return false;
        at += size;
    }
    columns->row_count += count;
    return true;
}

static void drop_columns(struct columns *columns, const struct columns *empty)
{
    for (size_t k = 0; k < MOST_COLUMNS; k++)
        Py_XDECREF(columns->columns[k].values);
    *columns = *empty;
}

/* The number of rows, and a list of bytearrays. */
static PyObject *result_of_columns(struct columns *columns)
{
    size_t column_count = columns->numbers + columns->codes;
    PyObject *list = PyList_New((Py_ssize_t)column_count);
    for (size_t k = 0; list != NULL && k < column_count; k++) {
        struct column *column = &columns->columns[k];
        size_t count = column->is_varied || columns->row_count == 0 ? columns->row_count : 1;
        size_t size = (k < columns->numbers ? 8 : 4) * count;
        PyObject *values = column->values;
        if (values == NULL)
            values = PyByteArray_FromStringAndSize(NULL, 0);
        else if (PyByteArray_Resize(values, (Py_ssize_t)size) < 0)
            Py_CLEAR(values);
        column->values = NULL;
        if (values == NULL || PyList_SetItem(list, (Py_ssize_t)k, values) < 0)
            Py_CLEAR(list);
    }
    return list == NULL ? NULL : Py_BuildValue("(nN)", (Py_ssize_t)columns->row_count, list);
}

/* ---- The module ---- */

struct scanner_object {
    PyObject_HEAD
    struct scanner scanner;
    bool is_scanning; /* without the GIL */
    bool is_understood; /* the piece that was read last */
};

struct columns_object {
    PyObject_HEAD
    struct merged merged;
    struct columns spans, memory;
};

static void delete_object(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(object);
    Py_DECREF(type);
}

/* The new entries of a table of kinds, as the items of a JSON list, without the last comma. */
static PyObject *new_of(const struct table *table)
{
    const struct entry *entries = (const struct entry *)table->entries.data;
    if (table->count == table->kept)
        return PyBytes_FromStringAndSize(NULL, 0);
    size_t begin = entries[table->kept].begin;
    return PyBytes_FromStringAndSize(table->texts.data + begin,
                                     (Py_ssize_t)(table->texts.size - begin - 1));
}

/* The texts of a table as a list of bytes. */
static PyObject *list_of(const struct table *table)
{
    const struct entry *entries = (const struct entry *)table->entries.data;
    PyObject *list = PyList_New(table->count);
    for (int32_t k = 0; list != NULL && k < table->count; k++) {
        PyObject *text = PyBytes_FromStringAndSize(table->texts.data + entries[k].begin,
                                                   (Py_ssize_t)entries[k].size);
        if (text == NULL || PyList_SetItem(list, k, text) < 0)
            Py_CLEAR(list);
    }
    return list;
}

static void delete_scanner(PyObject *object)
{
    free_scanner(&((struct scanner_object *)object)->scanner);
    delete_object(object);
}

static PyObject *scan(PyObject *object, PyObject *args)
{
    struct scanner_object *self = (struct scanner_object *)object;
    PyObject *bytes;
    Py_ssize_t begin, end;
    if (!PyArg_ParseTuple(args, "Snn:scan", &bytes, &begin, &end))
        return NULL;
    if (self->is_scanning) {
        PyErr_SetString(PyExc_RuntimeError, "another thread uses this scanner");
        return NULL;
    }
    if (begin < 0 || begin > end || end > PyBytes_Size(bytes) || (size_t)end > MOST_BYTES) {
        PyErr_SetString(PyExc_ValueError, "begin and end must be positions in the text");
        return NULL;
    }
    const char *data = PyBytes_AsString(bytes);
    if (data == NULL)
        return NULL;
    self->is_scanning = true;
    self->is_understood = false;
    Py_BEGIN_ALLOW_THREADS
    bool is_understood = scan_piece((struct text){data + begin, data + end}, &self->scanner);
    if (!is_understood)
        restart(&self->scanner);
    self->is_understood = is_understood;
    Py_END_ALLOW_THREADS
    self->is_scanning = false;
    return PyBool_FromLong(self->is_understood);
}

static PyObject *new_columns(PyTypeObject *type, PyObject *Py_UNUSED(args),
                             PyObject *Py_UNUSED(named))
{
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    struct columns_object *self = (struct columns_object *)allocate(type, 0);
    if (self != NULL) {
        restart_merged(&self->merged);
        self->spans = NO_SPANS;
        self->memory = NO_MEMORY;
    }
    return (PyObject *)self;
}

static void forget(struct columns_object *self)
{
    restart_merged(&self->merged);
    drop_columns(&self->spans, &NO_SPANS);
    drop_columns(&self->memory, &NO_MEMORY);
}

static void delete_columns(PyObject *object)
{
    forget((struct columns_object *)object);
    delete_object(object);
}

/* The scanner that is the argument of a method; NULL, with an exception, if it has no piece. */
static struct scanner_object *with_piece(PyObject *object)
{
    struct scanner_object *found = (struct scanner_object *)object;
    bool is_scanner = PyType_GetSlot(Py_TYPE(object), Py_tp_dealloc) == (void *)delete_scanner;
    if (!is_scanner || found->is_scanning || !found->is_understood) {
        PyErr_SetString(PyExc_ValueError, "the scanner has no piece that it understood");
        return NULL;
    }
    return found;
}

static PyObject *add(PyObject *object, PyObject *argument)
{
    struct columns_object *self = (struct columns_object *)object;
    struct scanner_object *from = with_piece(argument);
    if (from == NULL)
        return NULL;
    if (!merge(&self->merged, &from->scanner)) {
        from->is_understood = false;
        Py_RETURN_NONE;
    }
    return Py_BuildValue("(LLNNN)", (long long)from->scanner.recorded,
                         (long long)from->scanner.counters,
                         new_of(&self->merged.tables[SPAN_KINDS]),
                         new_of(&self->merged.tables[MEMORY_KINDS]),
                         new_of(&from->scanner.tables[OTHER_KINDS]));
}

static PyObject *keep(PyObject *object, PyObject *argument)
{
    struct columns_object *self = (struct columns_object *)object;
    struct scanner_object *from = with_piece(argument);
    if (from == NULL)
        return NULL;
    from->is_understood = false;
    if (!extend_all(&self->spans, &from->scanner.spans)
        || !extend_all(&self->memory, &from->scanner.memory)) {
        forget(self); /* the columns may have different lengths */
        return NULL;
    }
    keep_merged(&self->merged, &from->scanner);
    return PyLong_FromSize_t(held_by(self->merged.tables, MERGED_TABLES));
}

static PyObject *take_all(PyObject *object, PyObject *Py_UNUSED(args))
{
    struct columns_object *self = (struct columns_object *)object;
    struct table *tables = self->merged.tables;
    for (int k = 0; k < MERGED_TABLES; k++)
        forget_new(&tables[k]);
    PyObject *result = Py_BuildValue("(NN(NNNN))", result_of_columns(&self->spans),
                                     result_of_columns(&self->memory),
                                     list_of(&tables[SHAPES]), list_of(&tables[CONCRETE]),
                                     list_of(&tables[TYPES]), list_of(&tables[CALL_STACK]));
    forget(self);
    return result;
}

static PyMethodDef scanner_methods[] = {
    {"scan", scan, METH_VARARGS,
     "Read the events between two positions of a text; false if the text is not understood."},
    {NULL, NULL, 0, NULL},
};

static PyMethodDef columns_methods[] = {
    {"add", add, METH_O,
     "Add the piece that a scanner has read, but not yet its rows.\n\n"
     "Returns None if memory is not enough. Else the number of events, that of counter events, and\n"
     "JSON lists without their brackets: the new kinds of events with a duration, of memory events\n"
     "and of other instant events."},
    {"keep", keep, METH_O,
     "Append the rows of the piece that was added last. Returns the bytes of the kinds and texts."},
    {"take", take_all, METH_NOARGS,
     "Remove and return all that was kept.\n\n"
     "Returns the columns of events with a duration, the columns of memory events, and the distinct\n"
     "long texts. Columns are the number of rows, and a bytearray of each column's values; if all\n"
     "values are equal, it has one."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot scanner_slots[] = {
    {Py_tp_doc, "Reads the events of a trace from its JSON text, one piece at a time."},
    {Py_tp_dealloc, delete_scanner},
    {Py_tp_methods, scanner_methods},
    {0, NULL},
};

static PyType_Slot columns_slots[] = {
    {Py_tp_doc, "The events of the pieces of a trace, as columns."},
    {Py_tp_new, new_columns},
    {Py_tp_dealloc, delete_columns},
    {Py_tp_methods, columns_methods},
    {0, NULL},
};

static PyType_Spec scanner_spec = {
    .name = "instrument.read.trace._scanner.Scanner",
    .basicsize = sizeof(struct scanner_object),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = scanner_slots,
};

static PyType_Spec columns_spec = {
    .name = "instrument.read.trace._scanner.Columns",
    .basicsize = sizeof(struct columns_object),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = columns_slots,
};

static int execute(PyObject *module)
{
    prepare_keys();
    PyObject *keys = PyList_New(0);
    for (size_t k = 0; keys != NULL && k < COUNT(ARGS_MEMBERS); k++) {
        if (ARGS_MEMBERS[k].what == SKIPPED)
            continue;
        PyObject *key = PyUnicode_FromString(ARGS_MEMBERS[k].key);
        if (key == NULL || PyList_Append(keys, key) < 0)
            Py_CLEAR(keys);
        Py_XDECREF(key);
    }
    PyObject *scanner = keys == NULL ? NULL : PyType_FromSpec(&scanner_spec);
    PyObject *columns = scanner == NULL ? NULL : PyType_FromSpec(&columns_spec);
    bool is_added = columns != NULL && PyModule_AddObjectRef(module, "ARGS", keys) == 0
        && PyModule_AddObjectRef(module, "Scanner", scanner) == 0
        && PyModule_AddObjectRef(module, "Columns", columns) == 0;
    Py_XDECREF(keys);
    Py_XDECREF(scanner);
    Py_XDECREF(columns);
    return is_added ? 0 : -1;
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, execute}, {0, NULL}};

static PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "instrument.read.trace._scanner",
    .m_doc = "Reads the events of a trace from its JSON text.",
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__scanner(void)
{
    return PyModuleDef_Init(&definition);
}

#endif

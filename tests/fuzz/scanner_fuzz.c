/* Runs the scanner on any bytes, for libFuzzer; `make fuzz` builds it with ASan and UBSan. */

#define WITHOUT_PYTHON
#define FIRST_SLOTS 2
#include "../../instrument/trace/_scanner.c"

static void check(bool holds)
{
    if (!holds)
        abort();
}

/* Each kind is an event that is read as the same kind. */
static void check_kinds(const struct table *kinds, bool are_spans)
{
    const struct entry *entries = (const struct entry *)kinds->entries.data;
    for (int32_t k = 0; k < kinds->count; k++) {
        struct piece again = {0};
        const char *begin = kinds->texts.data + entries[k].begin;
        struct text text = {begin, begin + entries[k].size};
        check(scan_piece(text, &again));
        check(again.recorded == 1);
        const struct table *found = are_spans ? &again.kinds : &again.other_kinds;
        check(found->count == 1 && found->texts.size == entries[k].size);
        check(memcmp(found->texts.data, begin, entries[k].size) == 0);
        free_piece(&again);
    }
}

static void check_piece(const struct piece *piece)
{
    const struct span *spans = (const struct span *)piece->spans.data;
    const struct memory *memory = (const struct memory *)piece->memory.data;
    size_t span_count = piece->spans.size / sizeof *spans;
    size_t memory_count = piece->memory.size / sizeof *memory;
    check((int64_t)(span_count + memory_count) <= piece->recorded);
    for (size_t k = 0; k < span_count; k++) {
        check(spans[k].kind >= 0 && spans[k].kind < piece->kinds.count);
        for (int n = 0; n < TEXTS; n++)
            check(spans[k].texts[n] >= -1 && spans[k].texts[n] < piece->texts[n].count);
    }
    for (size_t k = 0; k < memory_count; k++)
        check(memory[k].kind >= 0 && memory[k].kind < piece->memory_kinds.count);
    check_kinds(&piece->kinds, true);
    check_kinds(&piece->memory_kinds, false);
    check_kinds(&piece->other_kinds, false);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    const char *begin = (const char *)data;
    struct piece piece = {0};
    prepare_keys();
    if (scan_piece((struct text){begin, begin + size}, &piece))
        check_piece(&piece);
    free_piece(&piece);
    return 0;
}

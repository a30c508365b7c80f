/* Runs the scanner on any bytes, for libFuzzer; `make fuzz` builds it with ASan and UBSan. */

#define WITHOUT_PYTHON
#define FIRST_SLOTS 2
#include "../../instrument/read/trace/_scanner.c"

static void check(bool holds)
{
    if (!holds)
        abort();
}

/* Each kind is an event, and a comma; the event is read as the same kind. */
static void check_kinds(const struct scanner *scanner, int table)
{
    const struct table *kinds = &scanner->tables[table];
    const struct entry *entries = (const struct entry *)kinds->entries.data;
    for (int32_t k = 0; k < kinds->count; k++) {
        struct scanner again = {0};
        const struct table *found = &again.tables[table == SPAN_KINDS ? SPAN_KINDS : OTHER_KINDS];
        const char *begin = kinds->texts.data + entries[k].begin;
        check(scan_piece((struct text){begin, begin + entries[k].size - 1}, &again));
        check(again.recorded == 1);
        check(found->count == 1 && found->texts.size == entries[k].size);
        check(memcmp(found->texts.data, begin, entries[k].size) == 0);
        free_scanner(&again);
    }
}

static void check_rows(const struct scanner *scanner)
{
    const struct span *spans = (const struct span *)scanner->spans.data;
    const struct memory *memory = (const struct memory *)scanner->memory.data;
    const struct table *tables = scanner->tables;
    size_t span_count = scanner->spans.size / sizeof *spans;
    size_t memory_count = scanner->memory.size / sizeof *memory;
    check((int64_t)(span_count + memory_count) <= scanner->recorded);
    for (size_t k = 0; k < span_count; k++) {
        check(spans[k].kind >= 0 && spans[k].kind < tables[SPAN_KINDS].count);
        for (int n = 0; n < TEXTS; n++)
            check(spans[k].texts[n] >= -1 && spans[k].texts[n] < tables[n].count);
    }
    for (size_t k = 0; k < memory_count; k++)
        check(memory[k].kind >= 0 && memory[k].kind < tables[MEMORY_KINDS].count);
}

/* Each entry of a table is found again at its position. */
static void check_tables(struct scanner *scanner)
{
    for (int t = 0; t < TABLES; t++) {
        struct table *table = &scanner->tables[t];
        const struct entry *entries = (const struct entry *)table->entries.data;
        int32_t count = table->count;
        for (int32_t k = 0; k < count; k++) {
            const char *text = table->texts.data + entries[k].begin;
            check(code_of(table, text, entries[k].size) == k);
        }
        check(table->count == count && count >= table->kept);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* Each zero byte ends a piece. Every second piece that is understood is kept. A piece that is not
 * kept leaves the tables as they were. */
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    const char *at = (const char *)data, *end = at + size;
    struct scanner scanner = {0};
    bool keeps = true;
    prepare_keys();
    for (; at <= end; at++) {
        const char *zero = at < end ? memchr(at, 0, (size_t)(end - at)) : NULL;
        const char *piece_end = zero != NULL ? zero : end;
        int32_t counts[TABLES];
        for (int t = 0; t < TABLES; t++)
            counts[t] = scanner.tables[t].kept;
        bool is_understood = scan_piece((struct text){at, piece_end}, &scanner);
        if (is_understood) {
            check_rows(&scanner);
            for (int t = SPAN_KINDS; t <= OTHER_KINDS; t++)
                check_kinds(&scanner, t);
        }
        if (is_understood && keeps) {
            keep_tables(&scanner);
        } else {
            restart(&scanner);
            for (int t = 0; t < TABLES; t++)
                check(scanner.tables[t].count == counts[t]);
        }
        keeps = is_understood ? !keeps : keeps;
        check_tables(&scanner);
        at = piece_end;
    }
    free_scanner(&scanner);
    return 0;
}

/* Runs the scanner on any bytes, for libFuzzer; `make fuzz` builds it with ASan and UBSan. */

#define WITHOUT_PYTHON
#define FIRST_SLOTS 2
#define MOST_HELD 400
#include "../../instrument/read/trace/_scanner.c"

static void check(bool holds)
{
    if (!holds)
        abort();
}

/* Each kind is an event, and a comma; the event, with a duration, is read as the same kind. */
static void check_kinds(const struct scanner *scanner, int table)
{
    const struct table *kinds = &scanner->tables[table];
    const struct entry *entries = (const struct entry *)kinds->entries.data;
    for (int32_t k = 0; k < kinds->count; k++) {
        struct scanner again = {0};
        const struct table *found = &again.tables[table == SPAN_KINDS ? SPAN_KINDS : OTHER_KINDS];
        const char *begin = kinds->texts.data + entries[k].begin;
        struct buffer event = {0};
        check(append(&event, "{\"dur\":1,", 9));
        check(append(&event, begin + 1, entries[k].size - 2));
        check(scan_piece((struct text){event.data, event.data + event.size}, &again));
        check(again.recorded == 1);
        check(found->count == 1 && found->texts.size == entries[k].size);
        check(memcmp(found->texts.data, begin, entries[k].size) == 0);
        free(event.data);
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
static void check_tables(struct table *tables, int table_count)
{
    for (int t = 0; t < table_count; t++) {
        struct table *table = &tables[t];
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

/* Each row has the same texts and kind as before its piece was merged. */
static void check_merged(const struct merged *merged, const struct scanner *scanner,
                         const struct span *before)
{
    const struct span *spans = (const struct span *)scanner->spans.data;
    for (size_t k = 0; k < scanner->spans.size / sizeof *spans; k++)
        for (int t = 0; t <= SPAN_KINDS; t++) {
            int32_t from = t < TEXTS ? before[k].texts[t] : before[k].kind;
            int32_t to = t < TEXTS ? spans[k].texts[t] : spans[k].kind;
            if (from < 0) {
                check(to == from);
                continue;
            }
            const struct entry *old = (const struct entry *)scanner->tables[t].entries.data + from;
            const struct entry *new = (const struct entry *)merged->tables[t].entries.data + to;
            check(to >= 0 && to < merged->tables[t].count && old->size == new->size);
            check(memcmp(scanner->tables[t].texts.data + old->begin,
                         merged->tables[t].texts.data + new->begin, old->size) == 0);
        }
}

/* Each zero byte ends a piece; two scanners take turns. Of the pieces that are understood, every
 * third is not kept, and after every seventh all is forgotten. */
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    const char *at = (const char *)data, *end = at + size;
    struct scanner scanners[2] = {{.recorded = 0}, {.recorded = 0}};
    struct merged merged = {.generation = 0};
    int understood = 0;
    prepare_keys();
    restart_merged(&merged);
    for (int turn = 0; at <= end; at++, turn++) {
        struct scanner *scanner = &scanners[turn % 2];
        const char *zero = at < end ? memchr(at, 0, (size_t)(end - at)) : NULL;
        const char *piece_end = zero != NULL ? zero : end;
        if (scan_piece((struct text){at, piece_end}, scanner)) {
            check_rows(scanner);
            for (int t = SPAN_KINDS; t <= OTHER_KINDS; t++)
                check_kinds(scanner, t);
            struct buffer before = {0};
            check(append(&before, scanner->spans.data, scanner->spans.size));
            check(merge(&merged, scanner));
            check_merged(&merged, scanner, (const struct span *)before.data);
            free(before.data);
            if (++understood % 3 != 0)
                keep_merged(&merged, scanner);
            if (understood % 7 == 0)
                restart_merged(&merged);
        }
        check_tables(scanner->tables, TABLES);
        check_tables(merged.tables, MERGED_TABLES);
        at = piece_end;
    }
    for (int k = 0; k < 2; k++)
        free_scanner(&scanners[k]);
    restart_merged(&merged);
    return 0;
}

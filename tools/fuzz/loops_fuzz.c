/* Calls the functions of `_loops.c` with any columns, for libFuzzer; see `run.py`. */

#include "../../instrument/read/facts/_loops.c"

#include <math.h>
#include <string.h>

#define MOST_COLUMNS 7
#define MOST_ROWS 64
#define COUNT(array) (sizeof(array) / sizeof *(array))

static void check(bool holds)
{
    if (!holds)
        abort();
}

/* ---- What each function finds, by the plainest loop ---- */

struct call {
    PyObject args[MOST_COLUMNS];
    const PyObject *result;
    Py_ssize_t rows;
};

#define INTS(object) ((const int64_t *)(object)->data)
#define SHORT_INTS(object) ((const int32_t *)(object)->data)

static void check_nest(const struct call *call)
{
    const int32_t *thread = SHORT_INTS(&call->args[0]);
    const int64_t *start = INTS(&call->args[1]), *end = INTS(&call->args[2]);
    const int64_t *parent = INTS(call->result);
    const int32_t *depth = (const int32_t *)(parent + call->rows), *until = depth + call->rows;
    for (Py_ssize_t k = 0; k < call->rows; k++) {
        Py_ssize_t above = k - 1;
        while (above >= 0 && thread[above] == thread[k] &&
               (end[above] < end[k] ||
                (start[k] == end[k] && end[above] == end[k] && end[k] < INT64_MAX)))
            above--;
        above = above >= 0 && thread[above] == thread[k] ? above : -1;
        check(parent[k] == above);
        check(depth[k] == (above >= 0 ? depth[above] + 1 : 0));
        check(until[k] > k && until[k] <= call->rows);
        check(above < 0 || until[k] <= until[above]);
    }
}

static void check_longest_paths(const struct call *call)
{
    const PyObject *shares = &call->args[5], *earliest = &call->args[6];
    Py_ssize_t scenarios = shares->size / BYTES(1, double), moments = earliest->size / 8;
    check(call->result->size == BYTES(scenarios * moments, int64_t));
    for (Py_ssize_t k = 0; k < scenarios * moments; k++)
        check(INTS(call->result)[k] >= INTS(earliest)[k / scenarios]);
}

/* ---- The arguments ---- */

/* What each argument holds: the bytes of an integer, d for doubles. */
static const struct {
    const char *name, *columns;
    void (*check)(const struct call *);
} FUNCTIONS[] = {
    {"nest", "488", check_nest},
    {"longest_paths", "44488d8", check_longest_paths},
};

static const int64_t EXTREMES[] = {
    INT64_MIN, INT64_MIN + 1, -((int64_t)1 << 62), -((int64_t)1 << 53), INT32_MIN, -1000,
    INT32_MAX, (int64_t)1 << 32, (int64_t)1 << 53, (int64_t)1 << 62, INT64_MAX - 1, INT64_MAX};
static const double SHARES[] = {0, 0.1, 0.5, 1, -1, 1e300, NAN, INFINITY, -INFINITY, 0x1p63};

struct input {
    const uint8_t *at, *end;
};

static uint8_t next(struct input *input)
{
    return input->at < input->end ? *input->at++ : 0;
}

/* Most often a small number, as an index is; else an extreme one. */
static int64_t next_number(struct input *input)
{
    uint8_t byte = next(input);
    size_t extreme = (size_t)(UINT8_MAX - byte);
    return extreme < COUNT(EXTREMES) ? EXTREMES[extreme] : byte - 8;
}

static void fill(PyObject *column, char type, Py_ssize_t rows, struct input *input)
{
    Py_ssize_t bytes = type == 'd' ? 8 : type - '0';
    column->size = bytes * rows;
    column->data = malloc((size_t)column->size);
    for (Py_ssize_t k = 0; k < rows; k++) {
        int64_t number = next_number(input);
        int32_t narrow = (int32_t)number;
        double share = SHARES[(uint64_t)number % COUNT(SHARES)];
        const void *from = type == '8'   ? (const void *)&number
                           : type == '4' ? (const void *)&narrow
                                         : (const void *)&share;
        memcpy(column->data + k * bytes, from, (size_t)bytes);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* The first bytes choose the function, the number of rows, and a column that has other rows. */
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct input input = {data, data + size};
    struct call call = {0};
    size_t number = next(&input) % COUNT(FUNCTIONS);
    const char *columns = FUNCTIONS[number].columns;
    call.rows = next(&input) % MOST_ROWS;
    size_t other = next(&input);
    Py_ssize_t cut = next(&input) % MOST_ROWS;
    for (size_t k = 0; columns[k]; k++) {
        fill(&call.args[k], columns[k], k == other ? cut : call.rows, &input);
        if (k + MOST_COLUMNS == other && cut < call.args[k].size)
            call.args[k].size = cut; /* of bytes, not of rows */
    }
    check(strcmp(methods[number].name, FUNCTIONS[number].name) == 0);
    check(COUNT(methods) == COUNT(FUNCTIONS) + 1);
    has_raised = false;
    PyObject *result = methods[number].call(NULL, call.args);
    check(has_raised == (result == NULL));
    if (result != NULL) {
        call.result = result;
        FUNCTIONS[number].check(&call);
        Py_DECREF(result);
    }
    for (size_t k = 0; columns[k]; k++)
        free(call.args[k].data);
    return 0;
}

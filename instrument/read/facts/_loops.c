/*
 * Loops over columns that NumPy cannot express, because each row depends on rows before it.
 * `call_tree.py`, `operators.py`, `whatif/program.py` and `timeline.py` do the same in NumPy and
 * Python for installations without a compiler.
 *
 * The columns are C arrays of char, int32_t, int64_t or double. Every index that comes from a
 * column is compared with the length of the column that it points into.
 */

#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdbool.h>
#include <stdint.h>
#ifdef __linux__
#include <sys/mman.h>
#endif

/* Since 3.13, the headers do not define this. Before 3.13, the other function refuses "y#". */
PyAPI_FUNC(int) _PyArg_ParseTuple_SizeT(PyObject *, const char *, ...);
#define PyArg_ParseTuple _PyArg_ParseTuple_SizeT

#define BYTES(count, type) ((count) * (Py_ssize_t)sizeof(type))
#define HUGE_PAGE ((uintptr_t)1 << 21)

/*
 * Makes a result of `size` bytes. If it is large, the kernel is asked for huge pages, as NumPy does
 * for its arrays: to get memory in pages of 4 KiB takes ten times as long.
 */
static PyObject *new_result(Py_ssize_t size)
{
    PyObject *result = PyBytes_FromStringAndSize(NULL, size);
#ifdef MADV_HUGEPAGE
    if (result != NULL) {
        uintptr_t begin = (uintptr_t)PyBytes_AsString(result), end = begin + (uintptr_t)size;
        uintptr_t first = (begin + HUGE_PAGE - 1) & ~(HUGE_PAGE - 1), last = end & ~(HUGE_PAGE - 1);
        if (first < last)
            madvise((void *)first, last - first, MADV_HUGEPAGE);
    }
#endif
    return result;
}

/*
 * Finds the parent and the depth of each event, and the index after its last descendant;
 * `call_tree.py` has the rule. Events are sorted by thread and start. The search for a parent
 * begins at the event before, and follows the parents. An event that it passes lies on the way of
 * no later search. So the time is linear in `count`.
 */
static void find_parents(const int32_t *thread, const int64_t *start, const int64_t *end,
                         Py_ssize_t count, int64_t *parent, int32_t *depth, int32_t *until)
{
    for (Py_ssize_t k = 0; k < count; k++) {
        int64_t needed = start[k] == end[k] && end[k] < INT64_MAX ? end[k] + 1 : end[k];
        int64_t above = k > 0 && thread[k] == thread[k - 1] ? k - 1 : -1;
        while (above >= 0 && end[above] < needed)
            above = parent[above];
        parent[k] = above;
        depth[k] = above >= 0 ? depth[above] + 1 : 0;
        until[k] = (int32_t)(k + 1);
    }
    for (Py_ssize_t k = count - 1; k >= 0; k--)
        if (parent[k] >= 0 && until[parent[k]] < until[k])
            until[parent[k]] = until[k];
}

static PyObject *nest(PyObject *Py_UNUSED(module), PyObject *args)
{
    const char *thread, *start, *end;
    Py_ssize_t thread_size, start_size, end_size;
    if (!PyArg_ParseTuple(args, "y#y#y#:nest", &thread, &thread_size, &start, &start_size, &end,
                          &end_size))
        return NULL;
    Py_ssize_t count = thread_size / BYTES(1, int32_t);
    if (count >= INT32_MAX) {
        PyErr_SetString(PyExc_ValueError, "there are too many events for 32 bits");
        return NULL;
    }
    if (thread_size != BYTES(count, int32_t) || start_size != BYTES(count, int64_t) ||
        end_size != start_size) {
        PyErr_SetString(PyExc_ValueError, "thread, start and end must have the same length");
        return NULL;
    }
    PyObject *result = new_result(BYTES(count, int64_t) + 2 * thread_size);
    if (result == NULL)
        return NULL;
    int64_t *parent = (int64_t *)PyBytes_AsString(result);
    int32_t *depth = (int32_t *)(parent + count);
    Py_BEGIN_ALLOW_THREADS
    find_parents((const int32_t *)thread, (const int64_t *)start, (const int64_t *)end, count,
                 parent, depth, depth + count);
    Py_END_ALLOW_THREADS
    return result;
}

/* The arcs of a program in an order in which no arc comes after an arc that starts at its target. */
struct arcs {
    Py_ssize_t count;
    const int32_t *target, *source, *number;
};

/* The weights of all arcs by their numbers: for each scenario, `own` plus a share of `change`. */
struct weights {
    Py_ssize_t count, scenarios;
    const int64_t *own, *change;
    const double *shares;
};

/* Addition that wraps around, because an overflow of signed integers is undefined. */
static int64_t sum(int64_t one, int64_t other)
{
    return (int64_t)((uint64_t)one + (uint64_t)other);
}

/* Cuts a number to an integer; INT64_MIN if it does not fit, as NumPy does on x86. */
static int64_t whole(double number)
{
    return number >= -0x1p63 && number < 0x1p63 ? (int64_t)number : INT64_MIN;
}

/*
 * Raises the time of each target to the time of its source plus the weight of the arc. `times` has
 * a row for each of `moments`, with a time for each scenario. Returns false if an arc has an index
 * that is out of bounds.
 */
static bool follow_arcs(const struct arcs *arcs, const struct weights *weights, Py_ssize_t moments,
                        int64_t *times)
{
    Py_ssize_t scenarios = weights->scenarios;
    for (Py_ssize_t k = 0; k < arcs->count; k++) {
        int32_t target = arcs->target[k], source = arcs->source[k], number = arcs->number[k];
        if (target < 0 || target >= moments || source < -1 || source >= moments || number < 0 ||
            number >= weights->count)
            return false;
        int64_t *to = times + target * scenarios;
        const int64_t *from = source >= 0 ? times + source * scenarios : NULL;
        int64_t own = weights->own[number], change = weights->change[number];
        for (Py_ssize_t j = 0; j < scenarios; j++) {
            int64_t weight = sum(own, whole(weights->shares[j] * (double)change));
            int64_t reached = from ? sum(from[j], weight) : weight;
            if (reached > to[j])
                to[j] = reached;
        }
    }
    return true;
}

static PyObject *longest_paths(PyObject *Py_UNUSED(module), PyObject *args)
{
    const char *target, *source, *number, *own, *change, *shares, *earliest;
    Py_ssize_t target_size, source_size, number_size, own_size, change_size, shares_size;
    Py_ssize_t earliest_size;
    bool is_valid;
    if (!PyArg_ParseTuple(args, "y#y#y#y#y#y#y#:longest_paths", &target, &target_size, &source,
                          &source_size, &number, &number_size, &own, &own_size, &change,
                          &change_size, &shares, &shares_size, &earliest, &earliest_size))
        return NULL;
    struct arcs arcs = {target_size / BYTES(1, int32_t), (const int32_t *)target,
                        (const int32_t *)source, (const int32_t *)number};
    struct weights weights = {own_size / BYTES(1, int64_t), shares_size / BYTES(1, double),
                              (const int64_t *)own, (const int64_t *)change,
                              (const double *)shares};
    Py_ssize_t moments = earliest_size / BYTES(1, int64_t);
    if (target_size != BYTES(arcs.count, int32_t) || own_size != BYTES(weights.count, int64_t) ||
        shares_size != BYTES(weights.scenarios, double) ||
        earliest_size != BYTES(moments, int64_t) || source_size != target_size ||
        number_size != target_size || change_size != own_size) {
        PyErr_SetString(PyExc_ValueError, "columns of arcs must have the same length");
        return NULL;
    }
    if (weights.scenarios && earliest_size > PY_SSIZE_T_MAX / weights.scenarios) {
        PyErr_NoMemory();
        return NULL;
    }
    PyObject *result = new_result(BYTES(moments, int64_t) * weights.scenarios);
    if (result == NULL)
        return NULL;
    int64_t *times = (int64_t *)PyBytes_AsString(result);
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t k = 0; k < moments; k++)
        for (Py_ssize_t j = 0; j < weights.scenarios; j++)
            times[k * weights.scenarios + j] = ((const int64_t *)earliest)[k];
    is_valid = follow_arcs(&arcs, &weights, moments, times);
    Py_END_ALLOW_THREADS
    if (!is_valid) {
        Py_DECREF(result);
        PyErr_SetString(PyExc_ValueError, "an arc has an index that is out of bounds");
        return NULL;
    }
    return result;
}

static PyMethodDef methods[] = {
    {"nest", nest, METH_VARARGS, "Find the parent, depth and last descendant of each event."},
    {"longest_paths", longest_paths, METH_VARARGS,
     "Find the length of the longest path to each moment, in several scenarios."},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {{0, NULL}};

static PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "instrument.read.facts._loops",
    .m_doc = "Loops over columns that NumPy cannot express.",
    .m_methods = methods,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__loops(void)
{
    return PyModuleDef_Init(&definition);
}

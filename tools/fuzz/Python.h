/*
 * The part of Python that `_loops.c` uses, for libFuzzer. The arguments of a call are an array of
 * objects: of bytes, or of a number in `size`. Memory has exactly the size that is asked for, so
 * that ASan notices each access outside.
 */

#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#define MOST_MEMORY ((size_t)1 << 24)
#define PY_SSIZE_T_MAX PTRDIFF_MAX
#define Py_UNUSED(name) name __attribute__((unused))
#define Py_BEGIN_ALLOW_THREADS {
#define Py_END_ALLOW_THREADS }
#define PyAPI_FUNC(type) static type
#define PyMODINIT_FUNC PyObject *
#define PyModuleDef_HEAD_INIT 0
#define METH_VARARGS 1
#define PyExc_ValueError NULL

typedef ptrdiff_t Py_ssize_t;
typedef struct {
    char *data;
    Py_ssize_t size;
} PyObject;
typedef struct {
    const char *name;
    PyObject *(*call)(PyObject *, PyObject *);
    int flags;
    const char *doc;
} PyMethodDef;
typedef struct {
    int slot;
    void *value;
} PyModuleDef_Slot;
typedef struct {
    int base;
    const char *m_name, *m_doc;
    PyMethodDef *m_methods;
    PyModuleDef_Slot *m_slots;
} PyModuleDef;

static bool has_raised;

static void PyErr_SetString(const void *Py_UNUSED(kind), const char *Py_UNUSED(text))
{
    has_raised = true;
}

static PyObject *PyErr_NoMemory(void)
{
    has_raised = true;
    return NULL;
}

static PyObject *PyBytes_FromStringAndSize(const char *Py_UNUSED(text), Py_ssize_t size)
{
    if (size < 0 || (size_t)size > MOST_MEMORY)
        return PyErr_NoMemory();
    PyObject *result = malloc(sizeof *result);
    result->data = malloc((size_t)size);
    result->size = size;
    return result;
}

static char *PyBytes_AsString(PyObject *bytes)
{
    return bytes->data;
}

static void Py_DECREF(PyObject *bytes)
{
    free(bytes->data);
    free(bytes);
}

/* Understands y# and n. */
static int _PyArg_ParseTuple_SizeT(PyObject *args, const char *format, ...)
{
    va_list places;
    va_start(places, format);
    for (; *format != ':'; format++) {
        if (*format == '#')
            continue;
        if (*format == 'y')
            *va_arg(places, const char **) = args->data;
        *va_arg(places, Py_ssize_t *) = args->size;
        args++;
    }
    va_end(places);
    return 1;
}

static PyObject *PyModuleDef_Init(PyModuleDef *Py_UNUSED(definition))
{
    return NULL;
}

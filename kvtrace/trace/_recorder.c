/* The recorder in C: a record is stored into a mapped window of the spool, and the wrappers of hooks and ops read
 * the clock and add their record in two calls.
 *
 * It writes what `writer.py` writes without it; a test holds the bytes equal. Two types:
 *
 *   Store   one spool. The head of a record is stored last: a record with a head is a whole one, so a killed
 *           process loses nothing. No write a step, no pack, no lock: the GIL is held for the whole record.
 *   Call    what a hook's or an op's wrapper calls twice. `begin` reads the clock, unless something else than the
 *           plain way is wanted; `end` reads the clock and adds the record.
 *
 * What a Call must know of a step stands in Python objects with __slots__, and is read there by its offset.
 *
 * The window. It lies behind the header (docs/trace-format.md) and holds the youngest blocks, then the records of
 * the open one, then zeros. A flush seals the open block. When the window is full, its blocks are written to the
 * end of the file and it is cleared. Its pages are used again and again and cost no page faults: a mapping that
 * moves along with the file costs three times as much a record. Its space was taken with fallocate before it is
 * mapped: a full disk is an error of a write, and no SIGBUS at a store. On file systems where taken space promises
 * nothing (those that copy on write, those on a network) no Store is made, and the recorder in Python writes there.
 *
 * Forks. A child shares the parent's pages: a handler that runs in it before anything else leaves all of the
 * parent's Stores dead there, and the agent opens a spool of its own.
 */
#define PY_SSIZE_T_CLEAN
#define _GNU_SOURCE
#include <Python.h>
#include <structmember.h>

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <time.h>
#include <unistd.h>

#if defined(Py_GIL_DISABLED) || !defined(__linux__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "kvtrace's recorder in C needs CPython with its lock, on a little-endian Linux"
#endif

/* Of kvtrace/trace/format.py; the module shows them to the test that holds them equal. */
enum { WORDS = 8, RECORD = 64, MOST_THREAD = 0x7FFF };
enum { KIND_HOOK = 4, KIND_OP = 5, KIND_EXEC = 14, KIND_TRAILER = 16, KIND_SEAL = 30 };
enum { STOP_SIZE_LIMIT = 2, STOP_WRITE_FAILED = 3, STOP_DESCRIPTOR_LOST = 5 };
enum { FLAG_RAISED = 1, FLAG_NO_METADATA = 256 };

enum {
    WINDOW = 4096, /* records of the window */
    KEPT_BACK = 2, /* of these: the TRAILER and its SEAL, for when no more can be written */
    MOST_NESTED = 32, /* hooks that call hooks, in one thread */
    MOST_SWITCHES = 4, /* of one hook */
    MOST_GROUPS = 64, /* hooks and ops of one quiet step */
    KNOWN = 64, /* layers of a hook or an op that are found by their address */
};

typedef struct { int64_t word[WORDS]; } Record;

typedef struct Store {
    PyObject_HEAD
    Record *next, *edge; /* where the next record goes, and how far there is room; NULL: no more is recorded */
    Record *block; /* begin of the open block */
    Record *window;
    char *map; /* the header's last page, and the window */
    size_t mapped;
    int64_t end; /* bytes of the file, as far as it is written */
    int64_t size; /* that, and what is sealed in the window */
    int64_t number; /* of the open block */
    int64_t limit, ceiling, lost;
    uint32_t seed; /* of checksums: the header's own */
    int fd;
    char full, alive;
    dev_t device;
    ino_t inode;
    PyObject *path; /* str; set anew when the file gets another name */
    struct Store *after; /* the next of this process's Stores */
} Store;

static Store *all_stores; /* for the handler of forks */
static Store *current; /* that of the agent, where Calls add their records */
static unsigned generation = 1; /* of the agent's spools: what a thread knows is of one of them */

/* What a thread keeps, from the begin of a call to its end. */
typedef struct {
    unsigned generation;
    unsigned depth;
    int64_t index; /* of the thread, shifted to where it stands in a head */
    int64_t begun[MOST_NESTED];
} Thread;
static __thread Thread mine;

/* The clock of time.perf_counter_ns (writer.py asks whether it is). */
static inline int64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* --- checksums: CRC-32 as zlib's ----------------------------------------------------------------------- */

static uint32_t crc_table[8][256];

static void make_crc_table(void) {
    for (uint32_t n = 0; n < 256; n++) {
        uint32_t c = n;
        for (int bit = 0; bit < 8; bit++) c = c & 1 ? 0xEDB88320u ^ (c >> 1) : c >> 1;
        crc_table[0][n] = c;
    }
    for (int k = 1; k < 8; k++)
        for (uint32_t n = 0, c; n < 256; n++) {
            c = crc_table[k - 1][n];
            crc_table[k][n] = crc_table[0][c & 0xFF] ^ (c >> 8);
        }
}

/* Of words, eight bytes at a time; not inverted. */
static uint32_t crc_of_words(uint32_t crc, const int64_t *data, int64_t words) {
    while (words-- > 0) {
        uint64_t x = (uint64_t)*data++ ^ crc;
        crc = crc_table[7][x & 0xFF] ^ crc_table[6][x >> 8 & 0xFF] ^ crc_table[5][x >> 16 & 0xFF] ^
              crc_table[4][x >> 24 & 0xFF] ^ crc_table[3][x >> 32 & 0xFF] ^ crc_table[2][x >> 40 & 0xFF] ^
              crc_table[1][x >> 48 & 0xFF] ^ crc_table[0][x >> 56];
    }
    return crc;
}

#ifdef __x86_64__
typedef long long Lanes __attribute__((vector_size(16), aligned(8)));

/* Moves a remainder of 128 bits on by so many bits of message as the factors are for: powers of x modulo the
 * polynomial. */
__attribute__((target("pclmul,sse4.1"))) static inline Lanes folded(Lanes x, Lanes factors) {
    return __builtin_ia32_pclmulqdq128(x, factors, 0x00) ^ __builtin_ia32_pclmulqdq128(x, factors, 0x11);
}

/* Of records, one at a time: four remainders of 128 bits, which end as one. */
__attribute__((target("pclmul,sse4.1"))) static uint32_t crc_folded(uint32_t crc, const Record *r, int64_t records) {
    const Lanes by_512 = {0x154442bd4, 0x1c6e41596}, by_128 = {0x1751997d0, 0x0ccaa009e};
    const Lanes *data = (const Lanes *)r;
    Lanes a = data[0] ^ (Lanes) { crc, 0 }, b = data[1], c = data[2], d = data[3];
    while (--records > 0) {
        data += 4;
        a = folded(a, by_512) ^ data[0];
        b = folded(b, by_512) ^ data[1];
        c = folded(c, by_512) ^ data[2];
        d = folded(d, by_512) ^ data[3];
    }
    d ^= folded(c ^ folded(b ^ folded(a, by_128), by_128), by_128);
    int64_t left[2] = {d[0], d[1]};
    return crc_of_words(0, left, 2);
}
#endif

/* The CRC-32 of a block and of its seal's first three words. */
static uint32_t checksum(uint32_t seed, const Record *block, int64_t records, const int64_t *words) {
    uint32_t crc = ~seed;
#ifdef __x86_64__
    static int folds = -1;
    if (folds < 0) folds = __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1");
    if (folds)
        crc = crc_folded(crc, block, records);
    else
#endif
        crc = crc_of_words(crc, block->word, records * WORDS);
    return ~crc_of_words(crc, words, 3);
}

/* --- a spool's file ------------------------------------------------------------------------------------ */

static inline void put(Record *to, const int64_t *words) {
    memcpy(to->word + 1, words + 1, RECORD - sizeof(int64_t));
    __atomic_store_n(to->word, words[0], __ATOMIC_RELEASE);
}

/* Whether it is still this spool: the code of the process may close what it did not open, and the next file
 * that it opens gets the number. */
static int is_ours(const Store *s, int fd) {
    struct stat state;
    return fd >= 0 && fstat(fd, &state) == 0 && state.st_dev == s->device && state.st_ino == s->inode;
}

/* The spool's descriptor, opened anew by its name where the number is somebody else's; -1: it is lost. */
static int descriptor(Store *s) {
    if (is_ours(s, s->fd)) return s->fd;
    s->fd = -1;
    PyObject *name = PyUnicode_EncodeFSDefault(s->path);
    if (name == NULL) {
        PyErr_Clear();
        return -1;
    }
    int fd = open(PyBytes_AS_STRING(name), O_WRONLY | O_NOFOLLOW | O_CLOEXEC);
    Py_DECREF(name);
    if (is_ours(s, fd))
        s->fd = fd;
    else if (fd >= 0)
        close(fd);
    return s->fd;
}

static void unmap(Store *s) {
    if (s->map != NULL) munmap(s->map, s->mapped);
    s->map = NULL; s->window = s->next = s->edge = s->block = NULL; s->alive = 0;
}

/* Ends the open block. There is room for it. */
static void seal(Store *s) {
    int64_t records = s->next - s->block;
    if (records > 0) {
        int64_t words[WORDS] = {KIND_SEAL, s->number, records};
        words[3] = checksum(s->seed, s->block, records, words);
        put(s->next, words);
        s->number++;
        s->block = ++s->next; s->size = s->end + (s->block - s->window) * RECORD;
    }
}

/* The window's blocks to the end of the file; all of it is sealed. Returns 0, or why nothing more can be written:
 * they stay in the window then. */
static int write_out(Store *s) {
    if (s->next == s->window) return 0;
    if (descriptor(s) < 0) return STOP_DESCRIPTOR_LOST;
    const char *from = (const char *)s->window, *to = (const char *)s->next;
    while (from < to) {
        ssize_t written = pwrite(s->fd, from, (size_t)(to - from), s->size - (to - from));
        if (written == 0 || (written < 0 && errno != EINTR)) return STOP_WRITE_FAILED;
        from += written > 0 ? written : 0;
    }
    s->end = s->size;
    /* The first head first: what is in the file is from now on no more in the window. */
    __atomic_store_n(s->window->word, 0, __ATOMIC_RELEASE);
    memset(s->window, 0, (size_t)(to - (const char *)s->window));
    s->next = s->block = s->window;
    return 0;
}

/* Seals what is open and says why it ends. */
static void stop(Store *s, int why) {
    if (!s->alive) return;
    seal(s);
    int64_t words[WORDS] = {KIND_TRAILER | (int64_t)why << 16, now(), s->lost};
    put(s->next++, words);
    seal(s);
    if (why != STOP_WRITE_FAILED) write_out(s);
    if (descriptor(s) >= 0) {
        if (ftruncate(s->fd, s->end)) /* half a block may stand there: in the window it is whole */
            errno = 0;
        close(s->fd);
        s->fd = -1;
    }
    unmap(s);
}

static void flush(Store *s) {
    if (!s->alive) return;
    seal(s);
    s->full = s->full || s->size >= s->limit;
    if (s->size >= s->ceiling) stop(s, STOP_SIZE_LIMIT);
}

/* Where there is no room in the window. Returns -1 where nothing is recorded any more. */
static int make_room(Store *s) {
    flush(s);
    int why = s->alive ? write_out(s) : 0;
    if (why) stop(s, why);
    return s->alive ? 0 : -1;
}

static inline void add_record(Store *s, const int64_t *words) {
    if (__builtin_expect(s->next >= s->edge, 0) && make_room(s))
        s->lost++;
    else
        put(s->next++, words);
}

/* In the child of a fork, before anything else runs there: its parent's pages are its parent's. */
static void in_child(void) {
    for (Store *s = all_stores; s != NULL; s = s->after) {
        s->next = s->edge = NULL; s->alive = 0;
    }
    current = NULL;
    generation++;
}

/* Whether space that is taken on this file system is there when it is needed: ext4 (ext2 and ext3 refuse fallocate),
 * xfs, tmpfs, and overlayfs, of containers. */
static int keeps_its_word(int fd) {
    struct statfs fs;
    if (fstatfs(fd, &fs)) return 0;
    unsigned long type = (unsigned long)fs.f_type;
    return type == 0xEF53 || type == 0x58465342 || type == 0x01021994 || type == 0x794C7630;
}

/* --- Store, as Python sees it -------------------------------------------------------------------------- */

/* A word of a record; what is out of range is clamped. */
static int word_of(PyObject *item, int64_t *word) {
    int over = 0;
    if (PyLong_Check(item)) {
        *word = PyLong_AsLongLongAndOverflow(item, &over);
    } else { /* may run any code: nobody has a place in the file yet */
        Py_INCREF(item);
        PyObject *number = PyNumber_Long(item);
        Py_DECREF(item);
        if (number == NULL) return -1;
        *word = PyLong_AsLongLongAndOverflow(number, &over);
        Py_DECREF(number);
    }
    if (over) *word = over > 0 ? INT64_MAX : INT64_MIN;
    return 0;
}

static PyObject *Store_add(Store *s, PyObject *given) {
    PyObject *items = PySequence_Fast(given, "a record is a sequence of integers");
    if (items == NULL) return NULL;
    int64_t words[WORDS];
    for (Py_ssize_t at = 0; at + WORDS <= PySequence_Fast_GET_SIZE(items); at += WORDS) {
        for (int n = 0; n < WORDS; n++)
            if (at + n >= PySequence_Fast_GET_SIZE(items) ||
                word_of(PySequence_Fast_GET_ITEM(items, at + n), words + n)) {
                Py_DECREF(items);
                return NULL;
            }
        add_record(s, words);
    }
    Py_DECREF(items);
    Py_RETURN_NONE;
}

static PyObject *Store_flush(Store *s, PyObject *unused) { flush(s); Py_RETURN_NONE; }

static PyObject *Store_stop(Store *s, PyObject *why) {
    long code = PyLong_AsLong(why);
    if (code == -1 && PyErr_Occurred()) return NULL;
    flush(s);
    stop(s, (int)code);
    Py_RETURN_NONE;
}

static PyObject *Store_abandon(Store *s, PyObject *unused) {
    unmap(s);
    if (is_ours(s, s->fd)) close(s->fd);
    s->fd = -1;
    Py_RETURN_NONE;
}

static PyObject *Store_mark(Store *s, PyObject *unused) {
    return PyLong_FromLongLong(s->alive ? s->number * WINDOW + (s->next - s->window) : -1);
}

/* The calls of one hook or op in a quiet step. */
typedef struct {
    int64_t key, t0, step, count, total, least, most;
    PyObject *layers; /* bytes: the layer of each call */
} Group;

/* Returns how many there are, -1 where the step was not quiet. */
static int gather(Group *groups, Record *executed, const Record *begin, const Record *end) {
    int used = 0;
    for (const Record *r = begin; r < end; r++) {
        const int64_t *w = r->word, kind = w[0] & 0xFF, flags = w[0] >> 32 & 0xFFFF;
        if ((kind != KIND_HOOK && kind != KIND_OP && kind != KIND_EXEC) || flags & (FLAG_RAISED | FLAG_NO_METADATA) ||
            (kind == KIND_HOOK && (w[5] > 0 || w[6] > 0)))
            return -1;
        if (kind == KIND_EXEC) {
            if (executed->word[0]) return -1;
            *executed = *r;
            continue;
        }
        int64_t key = w[0] & 0xFFFF00FF, took = w[2] - w[1];
        Group *g = groups;
        while (g < groups + used && g->key != key) g++;
        if (g == groups + used) {
            if (++used > MOST_GROUPS) return -1;
            *g = (Group){key, w[1], w[3], 0, 0, took, took, NULL};
        }
        g->count++;
        g->total += took;
        g->least = took < g->least ? took : g->least;
        g->most = took > g->most ? took : g->most;
    }
    return used;
}

static PyObject *Store_collapse(Store *s, PyObject *given) {
    int64_t mark;
    Group groups[MOST_GROUPS + 1];
    if (word_of(given, &mark)) return NULL;
    if (!s->alive || mark / WINDOW != s->number || mark % WINDOW < s->block - s->window ||
        mark % WINDOW > s->next - s->window)
        Py_RETURN_NONE;
    Record *begin = s->window + mark % WINDOW;
    Record executed = {{0}}; /* a step has one; its record stays */
    int used = gather(groups, &executed, begin, s->next);
    if (used < 0) Py_RETURN_NONE;
    PyObject *answer = PyList_New(used);
    for (int n = 0; answer != NULL && n < used; n++) {
        Group *g = groups + n;
        PyObject *layers = PyBytes_FromStringAndSize(NULL, g->count * (Py_ssize_t)sizeof(int64_t));
        if (layers != NULL) {
            int64_t *layer = (int64_t *)PyBytes_AS_STRING(layers);
            for (Record *r = begin; r < s->next; r++)
                if ((r->word[0] & 0xFFFF00FF) == g->key) *layer++ = r->word[4];
        }
        PyObject *item = layers == NULL ? NULL
                                        : Py_BuildValue("iiiLLLLLLN", (int)(g->key & 0xFF),
                                              (int)(g->key >> 16 & 0xFF), (int)(g->key >> 24 & 0xFF),
                                              (long long)g->t0, (long long)g->step, (long long)g->count,
                                              (long long)g->total, (long long)g->least, (long long)g->most, layers);
        if (item == NULL)
            Py_CLEAR(answer);
        else
            PyList_SET_ITEM(answer, n, item);
    }
    if (answer == NULL) return NULL;
    while (s->next > begin) { /* from the last one on: what stands there is a prefix at any time */
        __atomic_store_n((--s->next)->word, 0, __ATOMIC_RELEASE);
        memset(s->next, 0, RECORD);
    }
    if (executed.word[0]) put(s->next++, executed.word);
    return answer;
}

static PyObject *Store_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"fd", "path", "window", "seed", "limit", "ceiling", NULL};
    PyObject *path;
    int fd;
    unsigned int seed;
    long long window, limit, ceiling;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "iULILL", names, &fd, &path, &window, &seed, &limit, &ceiling))
        return NULL;
    int64_t from = window & -(int64_t)sysconf(_SC_PAGESIZE), end = window + WINDOW * RECORD;
    struct stat state;
    char *map = MAP_FAILED;
    if (!keeps_its_word(fd))
        errno = EOPNOTSUPP;
    else if (fstat(fd, &state) == 0 && fallocate(fd, 0, 0, end) == 0)
        map = mmap(NULL, (size_t)(end - from), PROT_READ | PROT_WRITE, MAP_SHARED, fd, from);
    if (map == MAP_FAILED) return PyErr_SetFromErrnoWithFilenameObject(PyExc_OSError, path);
    Store *s = (Store *)type->tp_alloc(type, 0);
    if (s == NULL) {
        munmap(map, (size_t)(end - from));
        return NULL;
    }
    s->path = Py_NewRef(path); s->fd = fd; s->device = state.st_dev; s->inode = state.st_ino; s->seed = seed;
    s->limit = limit; s->ceiling = ceiling; s->end = s->size = end; s->map = map;
    s->mapped = (size_t)(end - from); s->next = s->block = s->window = (Record *)(map + (window - from));
    s->edge = s->window + WINDOW - KEPT_BACK - 1; /* and its own SEAL */
    s->alive = 1; s->after = all_stores;
    all_stores = s;
    return (PyObject *)s;
}

static void Store_dealloc(Store *s) {
    for (Store **at = &all_stores; *at != NULL; at = &(*at)->after)
        if (*at == s) {
            *at = s->after;
            break;
        }
    unmap(s);
    if (is_ours(s, s->fd)) close(s->fd);
    Py_XDECREF(s->path);
    Py_TYPE(s)->tp_free((PyObject *)s);
}

static PyMethodDef store_methods[] = {
    {"add", (PyCFunction)Store_add, METH_O,
        "add(words): whole records of eight integers each, in a tuple or a list."},
    {"flush", (PyCFunction)Store_flush, METH_NOARGS, "flush(): seal what was added since the last time."},
    {"stop", (PyCFunction)Store_stop, METH_O, "stop(why): seal, write the trailer, record no more."},
    {"abandon", (PyCFunction)Store_abandon, METH_NOARGS, "abandon(): record no more, and leave the file as it is."},
    {"mark", (PyCFunction)Store_mark, METH_NOARGS, "mark(): the place of the next record, for collapse()."},
    {"collapse", (PyCFunction)Store_collapse, METH_O,
        "collapse(mark): take the calls recorded since out again where the step was quiet.\n\n"
        "Nothing stored, loaded, raised or odd, and nothing sealed since. Returns None where it was not,\n"
        "else (kind, code, detail, t0, step, count, total, least, most, layers) of each hook and op."},
    {NULL},
};

static PyMemberDef store_members[] = {
    {"size", T_LONGLONG, offsetof(Store, size), READONLY, "bytes of the file that are sealed"},
    {"blocks", T_LONGLONG, offsetof(Store, number), READONLY, "blocks that are sealed"},
    {"lost", T_LONGLONG, offsetof(Store, lost), 0, "records dropped since it stopped"},
    {"limit", T_LONGLONG, offsetof(Store, limit), 0, "size from which it is full"},
    {"ceiling", T_LONGLONG, offsetof(Store, ceiling), 0, "size at which it stops"},
    {"full", T_BOOL, offsetof(Store, full), 0, "whether it is past its limit"},
    {"alive", T_BOOL, offsetof(Store, alive), READONLY, "whether it records"},
    {"descriptor", T_INT, offsetof(Store, fd), READONLY, "the file's, -1 for none"},
    {"path", T_OBJECT_EX, offsetof(Store, path), 0, "str: the file"},
    {NULL},
};

static PyTypeObject StoreType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "kvtrace.trace._recorder.Store",
    .tp_doc = "Store(fd, path, window, seed, limit, ceiling): a spool whose window, at that offset, is mapped.\n\n"
              "Raises OSError: it can't be; the file is the caller's then, and the Store's else.",
    .tp_basicsize = sizeof(Store), .tp_flags = Py_TPFLAGS_DEFAULT, .tp_new = Store_new,
    .tp_dealloc = (destructor)Store_dealloc, .tp_methods = store_methods, .tp_members = store_members,
};

/* --- a call ---------------------------------------------------------------------------------------- */

/* An attribute of a Python object that stands in one of its class's __slots__, and the integer last seen there. */
typedef struct { PyObject *holder; Py_ssize_t at; PyObject *seen; int64_t word; } Slot;

/* Borrowed; NULL: unset. */
static inline PyObject *held(const Slot *slot) { return *(PyObject **)((char *)slot->holder + slot->at); }

static int find_slot(Slot *slot, PyObject *holder, PyObject *name) {
    PyObject *found = PyObject_GetAttr((PyObject *)Py_TYPE(holder), name);
    if (found == NULL) return -1;
    PyMemberDef *member = Py_IS_TYPE(found, &PyMemberDescr_Type) ? ((PyMemberDescrObject *)found)->d_member : NULL;
    Py_DECREF(found); /* the class has it */
    if (member == NULL || member->type != T_OBJECT_EX) {
        PyErr_Format(PyExc_TypeError, "%U is no slot of %R", name, Py_TYPE(holder));
        return -1;
    }
    slot->holder = Py_NewRef(holder); slot->at = member->offset;
    return 0;
}

static int look_again(Slot *slot, PyObject *value, int64_t *word) {
    int over = 0;
    if (value == NULL || !PyLong_Check(value)) return -1;
    *word = slot->word = PyLong_AsLongLongAndOverflow(value, &over);
    Py_XSETREF(slot->seen, over ? NULL : Py_NewRef(value));
    return over;
}

static inline int held_word(Slot *slot, int64_t *word) {
    PyObject *value = held(slot);
    *word = slot->word;
    return value != NULL && value == slot->seen ? 0 : look_again(slot, value, word);
}

/* Slots of a Call: what a record says (without holder: -1), of a hook which op runs next, and of that op; then the
 * switches, which are all None where a call goes the plain way. */
enum { STEP, BOUND_SLOTS, BOUND_ENTRIES, HOOKED, MODE, DIRECT_DEPTH, SWITCHES, SLOTS = SWITCHES + MOST_SWITCHES };

typedef struct { PyObject *name; int64_t id; unsigned generation; } Layer;

typedef struct {
    PyObject_HEAD
    PyObject *agent, *threads, *ids; /* the Agent; its dict of threads, and of layers (NULL: no layer) */
    Slot slot[SLOTS];
    int64_t head, direct, skip, modes;
    int switched; /* how many switches there are */
    Layer known[KNOWN];
} Call;

/* call.begin(): a small integer for the call's end; None, where it goes another way. */
static PyObject *Call_begin(Call *c, PyObject *const *args, Py_ssize_t nargs) {
    for (int n = 0; n < c->switched; n++)
        if (held(c->slot + SWITCHES + n) != Py_None) Py_RETURN_NONE;
    Thread *t = &mine;
    unsigned at = t->depth % MOST_NESTED;
    t->depth = at + 1;
    t->begun[at] = now();
    return PyLong_FromLong((long)at);
}

static inline int ended(Thread *t, PyObject *token, int64_t *t0) {
    long at = PyLong_AsLong(token);
    if (at < 0 || at >= MOST_NESTED) return -1;
    t->depth = (unsigned)at; *t0 = t->begun[at];
    return 0;
}

/* The calling thread's index, shifted; asked for once in each spool. */
static inline int thread_index(Call *c, Thread *t, int64_t *index) {
    if (__builtin_expect(t->generation != generation, 0)) {
        unsigned asked = generation;
        int64_t word = -1;
        PyObject *ident = PyLong_FromUnsignedLong(PyThread_get_thread_ident());
        PyObject *value = ident == NULL ? NULL : PyObject_GetItem(c->threads, ident);
        int failed = value == NULL || word_of(value, &word);
        Py_XDECREF(ident); Py_XDECREF(value);
        if (failed) return -1;
        t->index = (word < MOST_THREAD ? word : MOST_THREAD) << 48;
        t->generation = asked;
    }
    *index = t->index;
    return 0;
}

/* The record goes to the spool; where none is mapped, the agent knows what becomes of it. */
static int note(Call *c, const int64_t *w) {
    if (__builtin_expect(current != NULL && current->alive, 1)) {
        add_record(current, w);
        return 0;
    }
    PyObject *done =
        PyObject_CallMethod(c->agent, "add", "((LLLLLLLL))", w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7]);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

/* The id of a layer. By its address where it was asked for in this spool: names are the same objects each time. */
static int layer_id(Call *c, PyObject *layer, int64_t *id) {
    Layer *known = c->known + ((uintptr_t)layer >> 4 ^ (uintptr_t)layer >> 10) % KNOWN;
    if (known->name != layer || known->generation != generation) {
        unsigned asked = generation;
        PyObject *found = PyDict_GetItemWithError(c->ids, layer);
        if (found == NULL || word_of(found, id)) return -1;
        if (!PyUnicode_CheckExact(layer)) return 0;
        known->id = *id; known->generation = asked;
        Py_XSETREF(known->name, Py_NewRef(layer));
    }
    *id = known->id;
    return 0;
}

static void set_hooked(Call *c, PyObject *layer) {
    PyObject **at = (PyObject **)((char *)c->slot[HOOKED].holder + c->slot[HOOKED].at);
    Py_XSETREF(*at, Py_NewRef(layer));
}

/* call.end(token[, layer]), of a hook. */
static PyObject *hook_end(Call *c, PyObject *const *args, Py_ssize_t nargs) {
    Thread *t = &mine;
    int64_t w[WORDS] = {0, 0, now(), 0, 0, -1, -1, 0}, index;
    if (nargs != (c->ids == NULL ? 1 : 2) || ended(t, args[0], w + 1) || thread_index(c, t, &index) ||
        held_word(c->slot + STEP, w + 3) || (c->ids != NULL && layer_id(c, args[1], w + 4)) ||
        (c->slot[BOUND_SLOTS].holder != NULL && held_word(c->slot + BOUND_SLOTS, w + 5)) ||
        (c->slot[BOUND_ENTRIES].holder != NULL && held_word(c->slot + BOUND_ENTRIES, w + 6)))
        goto otherwise;
    w[0] = c->head | index;
    if (note(c, w)) goto otherwise;
    if (c->slot[HOOKED].holder != NULL) set_hooked(c, args[1]);
    Py_RETURN_TRUE;
otherwise:
    PyErr_Clear();
    Py_RETURN_FALSE;
}

static PyObject *string_value;

/* call.end(token, layer name), of an op. */
static PyObject *op_end(Call *c, PyObject *const *args, Py_ssize_t nargs) {
    Thread *t = &mine;
    int64_t w[WORDS] = {0, 0, now(), 0, 0, 0, 0, c->skip}, index, depth;
    PyObject *layer = NULL, *hooked = c->slot[HOOKED].holder == NULL ? NULL : held(c->slot + HOOKED);
    if (nargs != 2 || ended(t, args[0], w + 1) || thread_index(c, t, &index) || held_word(c->slot + STEP, w + 3) ||
        w[3] == 0 || held_word(c->slot + MODE, w + 6) || w[6] < 0 || w[6] >= c->modes ||
        held_word(c->slot + DIRECT_DEPTH, &depth))
        goto otherwise;
    layer = PyUnicode_CheckExact(args[1]) ? Py_NewRef(args[1]) : PyObject_GetAttr(args[1], string_value);
    if (layer == NULL || !PyUnicode_Check(layer) || layer_id(c, layer, w + 4)) goto otherwise;
    if (c->slot[HOOKED].holder != NULL && hooked != layer &&
        (hooked == NULL || !PyUnicode_Check(hooked) || PyUnicode_Compare(hooked, layer)))
        goto otherwise;
    w[0] = (depth ? c->direct : c->head) | index;
    if (note(c, w)) goto otherwise;
    if (c->slot[HOOKED].holder != NULL) set_hooked(c, Py_None);
    Py_DECREF(layer);
    Py_RETURN_TRUE;
otherwise:
    PyErr_Clear();
    Py_XDECREF(layer);
    Py_RETURN_FALSE;
}

static PyObject *Call_end(Call *c, PyObject *const *args, Py_ssize_t nargs) {
    return c->modes < 0 ? hook_end(c, args, nargs) : op_end(c, args, nargs);
}

static PyObject *Call_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *keys[] = {"agent", "side", "head", "threads", "switches", "ids", "slots", "entries", "hooked",
        "direct", "skip", "modes", NULL};
    PyObject *agent, *side, *threads, *switches, *ids = Py_None, *slots = Py_None, *entries = Py_None,
                                                 *hooked = Py_None;
    long long head, direct = 0, skip = 0, modes = -1;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOLOO!|OOOOLLL", keys, &agent, &side, &head, &threads,
            &PyTuple_Type, &switches, &ids, &slots, &entries, &hooked, &direct, &skip, &modes))
        return NULL;
    int of_op = modes >= 0;
    if (PyTuple_GET_SIZE(switches) > MOST_SWITCHES || (ids == Py_None ? of_op : !PyDict_CheckExact(ids))) {
        PyErr_SetString(PyExc_TypeError, "too many switches, or ids that are no dict");
        return NULL;
    }
    Call *c = (Call *)type->tp_alloc(type, 0);
    if (c == NULL) return NULL;
    c->head = head; c->direct = direct; c->skip = skip; c->modes = modes;
    c->agent = Py_NewRef(agent); c->threads = Py_NewRef(threads);
    c->ids = ids == Py_None ? NULL : Py_NewRef(ids);
    PyObject *row = Py_BuildValue(
        "(sOOOzz)", "step", slots, entries, hooked, of_op ? "mode" : NULL, of_op ? "direct_depth" : NULL);
    int failed = row == NULL;
    for (int n = 0; !failed && n < 6; n++)
        if (PyTuple_GET_ITEM(row, n) != Py_None) failed = find_slot(c->slot + n, side, PyTuple_GET_ITEM(row, n));
    for (; !failed && c->switched < PyTuple_GET_SIZE(switches); c->switched++) {
        PyObject *holder, *name;
        failed = !PyArg_ParseTuple(PyTuple_GET_ITEM(switches, c->switched), "OU", &holder, &name) ||
                 find_slot(c->slot + SWITCHES + c->switched, holder, name);
    }
    Py_XDECREF(row);
    if (failed) Py_CLEAR(c);
    return (PyObject *)c;
}

static int Call_traverse(Call *c, visitproc visit, void *arg) {
    Py_VISIT(c->agent); Py_VISIT(c->threads); Py_VISIT(c->ids);
    for (int n = 0; n < SLOTS; n++) Py_VISIT(c->slot[n].holder);
    return 0;
}

static void Call_dealloc(Call *c) {
    PyObject_GC_UnTrack(c);
    for (int n = 0; n < SLOTS; n++) { Py_CLEAR(c->slot[n].holder); Py_CLEAR(c->slot[n].seen); }
    for (int n = 0; n < KNOWN; n++) Py_CLEAR(c->known[n].name);
    Py_XDECREF(c->agent); Py_XDECREF(c->threads); Py_XDECREF(c->ids);
    Py_TYPE(c)->tp_free((PyObject *)c);
}

static PyMethodDef call_methods[] = {
    {"begin", (PyCFunction)(void (*)(void))Call_begin, METH_FASTCALL,
        "begin(): a token; None, and no clock, where one of the switches is not None."},
    {"end", (PyCFunction)(void (*)(void))Call_end, METH_FASTCALL,
        "end(token), of a layer's hook and an op end(token, layer): adds the record.\n\n"
        "False where that is for the caller: a layer that is not known yet, an unusual op."},
    {NULL},
};

static PyTypeObject CallType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "kvtrace.trace._recorder.Call",
    .tp_doc = "Call(agent, side, head, threads, switches, ids=None, slots=None, entries=None, hooked=None,\n"
              "direct=0, skip=0, modes=-1): the calls of a hook or, where modes is given, of an op. A\n"
              "switch is an object and the name of a slot.",
    .tp_basicsize = sizeof(Call), .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, .tp_new = Call_new,
    .tp_dealloc = (destructor)Call_dealloc, .tp_traverse = (traverseproc)Call_traverse, .tp_methods = call_methods,
};

/* --- the module ---------------------------------------------------------------------------------------- */

static PyObject *begun(PyObject *module, PyObject *token) {
    int64_t t0;
    if (ended(&mine, token, &t0)) {
        PyErr_SetString(PyExc_ValueError, "no token of a Call");
        return NULL;
    }
    return PyLong_FromLongLong(t0);
}

static PyObject *use(PyObject *module, PyObject *store) {
    if (store != Py_None && !Py_IS_TYPE(store, &StoreType)) {
        PyErr_SetString(PyExc_TypeError, "no Store");
        return NULL;
    }
    static PyObject *kept;
    current = store == Py_None ? NULL : (Store *)store;
    generation++;
    Py_XSETREF(kept, Py_NewRef(store));
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"begun", begun, METH_O, "begun(token): when the call began that got it; the call is over."},
    {"use", use, METH_O, "use(store): where Calls add their records from now on; None: agent.add."},
    {NULL},
};

static PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_recorder", "The recorder in C: spools that are mapped.", -1, methods,
};

static const struct { const char *name; int value; } constants[] = {
    {"RECORD_SIZE", RECORD}, {"WINDOW", WINDOW}, {"WINDOW_FULL", WINDOW - KEPT_BACK - 1}, {"HOOK", KIND_HOOK},
    {"OP", KIND_OP}, {"EXEC", KIND_EXEC}, {"TRAILER", KIND_TRAILER}, {"SEAL", KIND_SEAL},
    {"SIZE_LIMIT", STOP_SIZE_LIMIT}, {"WRITE_FAILED", STOP_WRITE_FAILED},
    {"DESCRIPTOR_LOST", STOP_DESCRIPTOR_LOST}, {"RAISED", FLAG_RAISED}, {"NO_METADATA", FLAG_NO_METADATA},
};

PyMODINIT_FUNC PyInit__recorder(void) {
    make_crc_table();
    string_value = PyUnicode_InternFromString("value");
    if (!string_value || PyType_Ready(&StoreType) || PyType_Ready(&CallType) ||
        pthread_atfork(NULL, NULL, in_child))
        return PyErr_Occurred() ? NULL : PyErr_NoMemory();
    PyObject *module = PyModule_Create(&definition);
    int failed = module == NULL || PyModule_AddObjectRef(module, "Store", (PyObject *)&StoreType) ||
                 PyModule_AddObjectRef(module, "Call", (PyObject *)&CallType);
    for (size_t n = 0; !failed && n < sizeof constants / sizeof *constants; n++)
        failed = PyModule_AddIntConstant(module, constants[n].name, constants[n].value);
    if (failed) Py_CLEAR(module);
    return module;
}

/* Loaded before the C library: lets chosen calls that concern one folder fail.
 *
 * fault_watch(folder, call, first, last, error): the calls of that kind from the first-th to the
 * last-th fail with the error; with error 0 a write is short. fault_count(call) counts them.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

enum { WRITE, FSYNC, RENAME, OPEN, KINDS };

static char folder[PATH_MAX];
static int watched = -1, error_number;
static long first, last, count[KINDS];

void fault_watch(const char *path, int call, long from, long to, int error)
{
    strncpy(folder, path, sizeof folder - 1);
    memset(count, 0, sizeof count);
    watched = call, first = from, last = to, error_number = error;
}

long fault_count(int call) { return count[call]; }

static int strikes(int call, const char *path)
{
    if (!folder[0] || !path || strncmp(path, folder, strlen(folder)))
        return 0;
    long n = ++count[call];
    return call == watched && first <= n && n <= last;
}

static int strikes_file(int call, int file)
{
    char link[64], path[PATH_MAX];
    if (!folder[0])
        return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t size = readlink(link, path, sizeof path - 1);
    if (size < 0)
        return 0;
    path[size] = 0;
    return strikes(call, path);
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define FAIL do { errno = error_number; return -1; } while (0)

ssize_t write(int file, const void *data, size_t size)
{
    if (strikes_file(WRITE, file)) {
        if (error_number)
            FAIL;
        size = (size + 1) / 2;
    }
    return REAL(write)(file, data, size);
}

int fsync(int file)
{
    if (strikes_file(FSYNC, file))
        FAIL;
    return REAL(fsync)(file);
}

int fdatasync(int file)
{
    if (strikes_file(FSYNC, file))
        FAIL;
    return REAL(fdatasync)(file);
}

int rename(const char *from, const char *to)
{
    if (strikes(RENAME, from))
        FAIL;
    return REAL(rename)(from, to);
}

#define OPEN_LIKE(name, HEAD, ARGUMENTS)              \
    int name HEAD                                     \
    {                                                 \
        mode_t mode = 0;                              \
        if (flags & (O_CREAT | O_TMPFILE)) {          \
            va_list rest;                             \
            va_start(rest, flags);                    \
            mode = va_arg(rest, mode_t);              \
            va_end(rest);                             \
        }                                             \
        if (strikes(OPEN, path))                      \
            FAIL;                                     \
        return REAL(name) ARGUMENTS;                  \
    }

OPEN_LIKE(open, (const char *path, int flags, ...), (path, flags, mode))
OPEN_LIKE(open64, (const char *path, int flags, ...), (path, flags, mode))
OPEN_LIKE(openat, (int at, const char *path, int flags, ...), (at, path, flags, mode))
OPEN_LIKE(openat64, (int at, const char *path, int flags, ...), (at, path, flags, mode))

/* Stands between a process and its disk (LD_PRELOAD): notes what is written and synced below one directory, and makes
 * calls fail there on demand. Every wrapper makes the system call itself, so that nothing is noted twice.
 *
 * PERDURE_DISK_ROOT  the directory that is watched
 * PERDURE_DISK_LOG   the file that records are appended to; without it, calls can fail and nothing is noted
 *
 * A write is noted after it was made. A sync is noted when it begins and when it has ended: what was noted before its
 * beginning is on the disk after its end. So a record never promises more than the process could know. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <limits.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum { CREATE = 1, WRITE, TRUNCATE, SYNC_BEGIN, SYNC_END, RENAME, LINK, UNLINK, MKDIR, RMDIR, MARK, MAP };
enum { DURABLE = 1 };

struct record {
    uint32_t length; /* of all of it */
    uint8_t kind;
    uint8_t flags;
    uint16_t path, other; /* lengths of the names behind it */
    uint16_t unused;
    uint32_t process;
    uint64_t inode;
    int64_t place;
    uint64_t number;
};

#define MOST_HANDLES 65536
static char root[PATH_MAX];
static size_t root_length;
static int log_handle = -1;
static unsigned char known[MOST_HANDLES]; /* 0: not looked at, 1: elsewhere, 2: below the root */
static atomic_long sync_count;

/* Rules say which calls fail. */
#define MOST_RULES 16
struct rule {
    char calls[64];
    char pattern[128];
    long after, count;
    int error;
    long seen;
};
static struct rule rules[MOST_RULES];
static int rule_count;
static long room = -1; /* how many bytes files may still grow by; -1: as many as they like */
static atomic_long struck;
static int lies; /* whether a call that fails is reported as done, unless something was to be opened or read */

/* Return what a call returns that was to change something and fails. */
static int failed(int error) {
    errno = error;
    return lies ? 0 : -1;
}

__attribute__((constructor)) static void begin(void) {
    const char *given = getenv("PERDURE_DISK_ROOT"), *log = getenv("PERDURE_DISK_LOG");
    if (!given || strlen(given) >= sizeof root) return;
    strcpy(root, given);
    root_length = strlen(root);
    if (log) {
        int handle = syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
        if (handle >= 0) { /* out of the way of small numbers, and of limits on handles */
            log_handle = fcntl(handle, F_DUPFD_CLOEXEC, 900);
            if (log_handle < 0) log_handle = handle;
            else syscall(SYS_close, handle);
        }
    }
}

static int is_below(const char *path) {
    return root_length && !strncmp(path, root, root_length) && (path[root_length] == '/' || !path[root_length]);
}

static const char *inside(const char *path) {
    path += root_length;
    while (*path == '/') path++;
    return path;
}

static int name_of(int handle, char *out) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", handle);
    ssize_t length = readlink(link, out, PATH_MAX - 1);
    if (length < 0) return 0;
    out[length] = 0;
    char *gone = strstr(out, " (deleted)");
    if (gone) *gone = 0;
    return 1;
}

/* Write the absolute path of a name into `out`, and tell whether it is below the root. */
static int resolve(int directory, const char *name, char *out) {
    if (!root_length || !name) return 0;
    if (name[0] == '/') {
        if (strlen(name) >= PATH_MAX) return 0;
        strcpy(out, name);
    } else {
        if (directory == AT_FDCWD ? !getcwd(out, PATH_MAX) : !name_of(directory, out)) return 0;
        size_t length = strlen(out);
        if (length + strlen(name) + 2 > PATH_MAX) return 0;
        out[length] = '/';
        strcpy(out + length + 1, name);
    }
    size_t length = strlen(out);
    while (length > 1 && out[length - 1] == '/') out[--length] = 0;
    return is_below(out);
}

static int is_watched(int handle) {
    if (!root_length || handle < 0 || handle >= MOST_HANDLES || handle == log_handle) return 0;
    if (!known[handle]) {
        char name[PATH_MAX];
        int saved = errno;
        known[handle] = name_of(handle, name) && is_below(name) ? 2 : 1;
        errno = saved;
    }
    return known[handle] == 2;
}

static void forget(int handle) {
    if (handle >= 0 && handle < MOST_HANDLES) known[handle] = 0;
}

static uint64_t inode_of(int handle) {
    struct stat found;
    return fstat(handle, &found) ? 0 : found.st_ino;
}

static void put(int kind, int flags, const char *path, const char *other, uint64_t inode, int64_t place,
                uint64_t number, const struct iovec *data, int count, size_t size) {
    if (log_handle < 0) return;
    int saved = errno;
    struct record head = {0};
    struct iovec parts[3 + 64];
    head.kind = kind;
    head.flags = flags;
    head.path = path ? strlen(path) : 0;
    head.other = other ? strlen(other) : 0;
    head.process = getpid();
    head.inode = inode;
    head.place = place;
    head.number = number;
    parts[0] = (struct iovec){&head, sizeof head};
    parts[1] = (struct iovec){(void *)path, head.path};
    parts[2] = (struct iovec){(void *)other, head.other};
    int used = 3;
    size_t left = size;
    for (int each = 0; each < count && left && used < 67; each++) {
        size_t taken = data[each].iov_len < left ? data[each].iov_len : left;
        parts[used++] = (struct iovec){data[each].iov_base, taken};
        left -= taken;
    }
    head.length = sizeof head + head.path + head.other + (size - left);
    syscall(SYS_writev, log_handle, parts, used);
    errno = saved;
}

/* Tell whether a call is among those that are named, with spaces between them. "write" is not "open-write". */
static int is_among(const char *call, const char *names) {
    size_t length = strlen(call);
    for (const char *name = names; name; name = strchr(name, ' ')) {
        name += strspn(name, " ");
        if (strcspn(name, " ") == length && !strncmp(name, call, length)) return 1;
    }
    return 0;
}

/* Return the error that a call is to fail with, or 0. */
static int fault(const char *call, const char *path) {
    for (int each = 0; each < rule_count; each++) {
        struct rule *rule = &rules[each];
        if (!is_among(call, rule->calls)) continue;
        const char *name = is_below(path) ? inside(path) : path;
        if (fnmatch(rule->pattern, name, 0)) continue;
        long seen = rule->seen++;
        if (seen >= rule->after && (rule->count < 0 || seen < rule->after + rule->count)) {
            struck++;
            return rule->error;
        }
    }
    return 0;
}

static int fault_of_handle(const char *call, int handle) {
    char name[PATH_MAX];
    if (!rule_count || !is_watched(handle) || !name_of(handle, name)) return 0;
    return fault(call, name);
}

/* For the process itself, by ctypes. */
void perdure_disk_mark(const char *text, size_t size) {
    struct iovec part = {(void *)text, size};
    put(MARK, 0, NULL, NULL, 0, 0, 0, &part, 1, size);
}

int perdure_disk_fail(const char *calls, const char *pattern, long after, long count, int error) {
    if (rule_count == MOST_RULES || strlen(calls) >= 64 || strlen(pattern) >= 128) return -1;
    struct rule *rule = &rules[rule_count];
    strcpy(rule->calls, calls);
    strcpy(rule->pattern, pattern);
    rule->after = after;
    rule->count = count;
    rule->error = error;
    rule->seen = 0;
    return rule_count++;
}

long perdure_disk_heal(void) {
    rule_count = 0;
    room = -1;
    return atomic_exchange(&struck, 0);
}

void perdure_disk_room(long bytes) { room = bytes; }

void perdure_disk_lie(void) { lies = 1; }

long perdure_disk_struck(void) { return struck; }

static int opened(int directory, const char *name, int flags, mode_t mode) {
    char path[PATH_MAX];
    int saved = errno;
    int here = resolve(directory, name, path) && !(flags & O_PATH), is_new = 0;
    errno = saved;
    if (here) {
        int error = rule_count ? fault("open", path) : 0;
        if (!error && rule_count && (flags & (O_WRONLY | O_RDWR | O_CREAT | O_TRUNC))) error = fault("open-write", path);
        if (error) {
            errno = error;
            return -1;
        }
        struct stat found;
        is_new = (flags & O_CREAT) && fstatat(AT_FDCWD, path, &found, AT_SYMLINK_NOFOLLOW);
        errno = saved;
    }
    int handle = syscall(SYS_openat, directory, name, flags, mode);
    if (handle < 0) return handle;
    forget(handle);
    if (here) {
        if (handle < MOST_HANDLES) known[handle] = 2;
        if (is_new) put(CREATE, 0, inside(path), NULL, inode_of(handle), 0, 0, NULL, 0, 0);
        else if (flags & O_TRUNC) put(TRUNCATE, 0, NULL, NULL, inode_of(handle), 0, 0, NULL, 0, 0);
    }
    return handle;
}

#define MODE_OF(flags)                                  \
    mode_t mode = 0;                                    \
    if ((flags) & (O_CREAT | __O_TMPFILE)) {            \
        va_list rest;                                   \
        va_start(rest, flags);                          \
        mode = va_arg(rest, mode_t);                    \
        va_end(rest);                                   \
    }

int open(const char *name, int flags, ...) { MODE_OF(flags) return opened(AT_FDCWD, name, flags, mode); }
int open64(const char *name, int flags, ...) { MODE_OF(flags) return opened(AT_FDCWD, name, flags | O_LARGEFILE, mode); }
int openat(int at, const char *name, int flags, ...) { MODE_OF(flags) return opened(at, name, flags, mode); }
int openat64(int at, const char *name, int flags, ...) { MODE_OF(flags) return opened(at, name, flags | O_LARGEFILE, mode); }
int creat(const char *name, mode_t mode) { return opened(AT_FDCWD, name, O_CREAT | O_WRONLY | O_TRUNC, mode); }
int creat64(const char *name, mode_t mode) { return creat(name, mode); }
int __open_2(const char *name, int flags) { return opened(AT_FDCWD, name, flags, 0); }
int __open64_2(const char *name, int flags) { return opened(AT_FDCWD, name, flags, 0); }
int __openat_2(int at, const char *name, int flags) { return opened(at, name, flags, 0); }
int __openat64_2(int at, const char *name, int flags) { return opened(at, name, flags, 0); }

int close(int handle) {
    if (handle == log_handle) return 0;
    forget(handle);
    return syscall(SYS_close, handle);
}

int dup2(int handle, int wanted) {
    int done = handle == wanted ? fcntl(handle, F_GETFD) : (int)syscall(SYS_dup3, handle, wanted, 0);
    if (done >= 0) forget(wanted);
    return done < 0 ? -1 : wanted;
}
int dup3(int handle, int wanted, int flags) {
    int done = syscall(SYS_dup3, handle, wanted, flags);
    if (done >= 0) forget(done);
    return done;
}

/* Return how many bytes of a write may be written: fewer where the room runs out, or -1 with errno. */
static ssize_t allowed(int handle, off_t place, size_t size) {
    int error = fault_of_handle("write", handle);
    if (error > 0) {
        errno = error;
        return -1;
    }
    if (error < 0 && size > 1) return size / 2; /* a short write */
    if (room < 0 || !is_watched(handle)) return size;
    struct stat found;
    if (fstat(handle, &found)) return size;
    if (place < 0) place = fcntl(handle, F_GETFL) & O_APPEND ? found.st_size : lseek(handle, 0, SEEK_CUR);
    off_t grown = place + (off_t)size - found.st_size;
    if (grown <= 0) return size;
    if (grown > (off_t)size) grown = size;
    if (grown <= room) {
        room -= grown;
        return size;
    }
    struck++;
    size -= grown - room;
    room = 0;
    if (size == 0) {
        errno = ENOSPC;
        return -1;
    }
    return size;
}

/* Return what the process is told of a write. */
static ssize_t told(ssize_t done, size_t size) { return lies ? (ssize_t)size : done; }

static void wrote(int handle, off_t place, const struct iovec *parts, int count, ssize_t size) {
    if (size <= 0 || log_handle < 0 || !is_watched(handle)) return;
    int saved = errno, flags = fcntl(handle, F_GETFL);
    if (place < 0) place = lseek(handle, 0, SEEK_CUR) - size;
    put(WRITE, flags & O_DSYNC ? DURABLE : 0, NULL, NULL, inode_of(handle), place, size, parts, count, size);
    errno = saved;
}

ssize_t write(int handle, const void *data, size_t size) {
    if (!is_watched(handle)) return syscall(SYS_write, handle, data, size);
    ssize_t may = allowed(handle, -1, size);
    if (may < 0) return told(may, size);
    ssize_t done = syscall(SYS_write, handle, data, (size_t)may);
    struct iovec part = {(void *)data, size};
    wrote(handle, -1, &part, 1, done);
    return told(done, size);
}

ssize_t pwrite64(int handle, const void *data, size_t size, off64_t place) {
    if (!is_watched(handle)) return syscall(SYS_pwrite64, handle, data, size, place);
    ssize_t may = allowed(handle, place, size);
    if (may < 0) return told(may, size);
    ssize_t done = syscall(SYS_pwrite64, handle, data, (size_t)may, place);
    struct iovec part = {(void *)data, size};
    wrote(handle, place, &part, 1, done);
    return told(done, size);
}
ssize_t pwrite(int handle, const void *data, size_t size, off_t place) { return pwrite64(handle, data, size, place); }

static size_t sum(const struct iovec *parts, int count) {
    size_t size = 0;
    for (int each = 0; each < count; each++) size += parts[each].iov_len;
    return size;
}

ssize_t writev(int handle, const struct iovec *parts, int count) {
    if (!is_watched(handle)) return syscall(SYS_writev, handle, parts, count);
    size_t size = sum(parts, count);
    ssize_t may = allowed(handle, -1, size);
    if (may < 0) return told(may, size);
    if ((size_t)may < size) count = 1;
    ssize_t done = syscall(SYS_writev, handle, parts, count);
    wrote(handle, -1, parts, count, done);
    return told(done, size);
}

ssize_t pwritev64(int handle, const struct iovec *parts, int count, off64_t place) {
    if (!is_watched(handle)) return syscall(SYS_pwritev, handle, parts, count, place, 0);
    size_t size = sum(parts, count);
    ssize_t may = allowed(handle, place, size);
    if (may < 0) return told(may, size);
    if ((size_t)may < size) count = 1;
    ssize_t done = syscall(SYS_pwritev, handle, parts, count, place, 0);
    wrote(handle, place, parts, count, done);
    return told(done, size);
}
ssize_t pwritev(int handle, const struct iovec *parts, int count, off_t place) {
    return pwritev64(handle, parts, count, place);
}

#define FAILING(call, handle)                        \
    {                                                \
        int error = fault_of_handle(call, handle);   \
        if (error > 0) return failed(error);         \
    }
#define READING(handle)                              \
    {                                                \
        int error = fault_of_handle("read", handle); \
        if (error > 0) {                             \
            errno = error;                           \
            return -1;                               \
        }                                            \
    }

ssize_t read(int handle, void *data, size_t size) {
    READING(handle)
    return syscall(SYS_read, handle, data, size);
}
ssize_t pread64(int handle, void *data, size_t size, off64_t place) {
    READING(handle)
    return syscall(SYS_pread64, handle, data, size, place);
}
ssize_t pread(int handle, void *data, size_t size, off_t place) { return pread64(handle, data, size, place); }
ssize_t __read_chk(int handle, void *data, size_t size, size_t most) { return read(handle, data, size < most ? size : most); }
ssize_t __pread64_chk(int handle, void *data, size_t size, off64_t place, size_t most) {
    return pread64(handle, data, size < most ? size : most, place);
}
ssize_t __pread_chk(int handle, void *data, size_t size, off_t place, size_t most) {
    return pread64(handle, data, size < most ? size : most, place);
}

static int truncated(int handle, off_t size) {
    FAILING("truncate", handle)
    int done = syscall(SYS_ftruncate, handle, size);
    if (!done && is_watched(handle)) put(TRUNCATE, 0, NULL, NULL, inode_of(handle), size, 0, NULL, 0, 0);
    return done;
}
int ftruncate(int handle, off_t size) { return truncated(handle, size); }
int ftruncate64(int handle, off64_t size) { return truncated(handle, size); }

int truncate(const char *name, off_t size) {
    int handle = opened(AT_FDCWD, name, O_WRONLY | O_CLOEXEC, 0);
    if (handle < 0) return -1;
    int done = truncated(handle, size);
    close(handle);
    return done;
}
int truncate64(const char *name, off64_t size) { return truncate(name, size); }

static int allocated(int handle, int mode, off_t place, off_t size) {
    FAILING("allocate", handle)
    if (is_watched(handle) && room >= 0) return failed(ENOSPC);
    struct stat before, after;
    int known_before = is_watched(handle) && !fstat(handle, &before);
    int done = syscall(SYS_fallocate, handle, mode, place, size);
    if (!done && known_before && !fstat(handle, &after) && after.st_size != before.st_size)
        put(TRUNCATE, 0, NULL, NULL, after.st_ino, after.st_size, 0, NULL, 0, 0);
    return done;
}
int fallocate(int handle, int mode, off_t place, off_t size) { return allocated(handle, mode, place, size); }
int fallocate64(int handle, int mode, off64_t place, off64_t size) { return allocated(handle, mode, place, size); }
int posix_fallocate(int handle, off_t place, off_t size) { return allocated(handle, 0, place, size) ? errno : 0; }
int posix_fallocate64(int handle, off64_t place, off64_t size) { return posix_fallocate(handle, place, size); }

static int synced(int handle, int number) {
    FAILING("sync", handle)
    if (!is_watched(handle) || log_handle < 0) return syscall(number, handle);
    char path[PATH_MAX];
    struct stat found;
    if (!name_of(handle, path) || fstat(handle, &found)) return syscall(number, handle);
    const char *directory = S_ISDIR(found.st_mode) ? inside(path) : NULL;
    int64_t token = ((int64_t)getpid() << 32) | (uint32_t)sync_count++;
    put(SYNC_BEGIN, directory ? 1 : 0, directory, NULL, found.st_ino, token, 0, NULL, 0, 0);
    int done = syscall(number, handle);
    if (!done) put(SYNC_END, directory ? 1 : 0, directory, NULL, found.st_ino, token, 0, NULL, 0, 0);
    return done;
}
int fsync(int handle) { return synced(handle, SYS_fsync); }
int fdatasync(int handle) { return synced(handle, SYS_fdatasync); }

static int renamed(int from, const char *old, int to, const char *new, unsigned flags) {
    char before[PATH_MAX], after[PATH_MAX];
    int here = resolve(from, old, before) && resolve(to, new, after);
    int error = here && rule_count ? fault("rename", after) : 0;
    if (error > 0) return failed(error);
    int done = syscall(SYS_renameat2, from, old, to, new, flags);
    if (!done && here) put(RENAME, 0, inside(before), inside(after), 0, 0, 0, NULL, 0, 0);
    return done;
}
int rename(const char *old, const char *new) { return renamed(AT_FDCWD, old, AT_FDCWD, new, 0); }
int renameat(int from, const char *old, int to, const char *new) { return renamed(from, old, to, new, 0); }
int renameat2(int from, const char *old, int to, const char *new, unsigned flags) {
    return renamed(from, old, to, new, flags);
}

static int linked(int from, const char *old, int to, const char *new, int flags) {
    char before[PATH_MAX], after[PATH_MAX];
    int here = resolve(from, old, before) && resolve(to, new, after);
    int error = here && rule_count ? fault("link", after) : 0;
    if (error > 0) return failed(error);
    int done = syscall(SYS_linkat, from, old, to, new, flags);
    if (!done && here) put(LINK, 0, inside(before), inside(after), 0, 0, 0, NULL, 0, 0);
    return done;
}
int link(const char *old, const char *new) { return linked(AT_FDCWD, old, AT_FDCWD, new, 0); }
int linkat(int from, const char *old, int to, const char *new, int flags) { return linked(from, old, to, new, flags); }

static int unlinked(int at, const char *name, int flags) {
    char path[PATH_MAX];
    int here = resolve(at, name, path);
    int error = here && rule_count ? fault("unlink", path) : 0;
    if (error > 0) return failed(error);
    int done = syscall(SYS_unlinkat, at, name, flags);
    if (!done && here) put(flags & AT_REMOVEDIR ? RMDIR : UNLINK, 0, inside(path), NULL, 0, 0, 0, NULL, 0, 0);
    return done;
}
int unlink(const char *name) { return unlinked(AT_FDCWD, name, 0); }
int unlinkat(int at, const char *name, int flags) { return unlinked(at, name, flags); }
int rmdir(const char *name) { return unlinked(AT_FDCWD, name, AT_REMOVEDIR); }
int remove(const char *name) {
    struct stat found;
    return unlinked(AT_FDCWD, name, !lstat(name, &found) && S_ISDIR(found.st_mode) ? AT_REMOVEDIR : 0);
}

static int made(int at, const char *name, mode_t mode) {
    char path[PATH_MAX];
    int here = resolve(at, name, path);
    int error = here && rule_count ? fault("mkdir", path) : 0;
    if (error > 0) return failed(error);
    int done = syscall(SYS_mkdirat, at, name, mode);
    if (!done && here) put(MKDIR, 0, inside(path), NULL, 0, 0, 0, NULL, 0, 0);
    return done;
}
int mkdir(const char *name, mode_t mode) { return made(AT_FDCWD, name, mode); }
int mkdirat(int at, const char *name, mode_t mode) { return made(at, name, mode); }

/* What is written through a mapping cannot be seen from here. */
static void *mapped(void *at, size_t size, int how, int flags, int handle, off_t place) {
    void *found = (void *)syscall(SYS_mmap, at, size, how, flags, handle, place);
    if (found != MAP_FAILED && (how & PROT_WRITE) && (flags & MAP_SHARED) && handle >= 0 && is_watched(handle))
        put(MAP, 0, NULL, NULL, inode_of(handle), place, size, NULL, 0, 0);
    return found;
}
void *mmap(void *at, size_t size, int how, int flags, int handle, off_t place) {
    return mapped(at, size, how, flags, handle, place);
}
void *mmap64(void *at, size_t size, int how, int flags, int handle, off64_t place) {
    return mapped(at, size, how, flags, handle, place);
}

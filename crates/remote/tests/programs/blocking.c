/* A thread in each kind of system call that a stop may interrupt, again and again: any EINTR, wrong result or early return
 * is told. Ends on SIGTERM and prints OK, or BAD and what was. */
#define _GNU_SOURCE
#include "hooked.h"
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <linux/io_uring.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ipc.h>
#include <sys/mman.h>
#include <sys/msg.h>
#include <sys/select.h>
#include <sys/sem.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/timerfd.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { NANOSLEEP, CLOCK_NANOSLEEP, POLL, PPOLL, SELECT, SELECT_CONSTANT, PSELECT, EPOLL_WAIT, EPOLL_PWAIT, FUTEX_TIMED, FUTEX_PLAIN, PIPE_READ,
       RECV_TIMED, ACCEPT_TIMED, ACCEPT_PLAIN, SIGTIMEDWAIT, WAIT4, SEMTIMEDOP, MSGRCV, IO_URING, TIMERFD, SIGSUSPEND,
       FALLOCATE, RING_SPLICE, KINDS };
static const char *names[KINDS] = {"nanosleep", "clock_nanosleep", "poll", "ppoll", "select", "select with a constant time-out", "pselect6", "epoll_wait",
  "epoll_pwait", "futex with time-out", "futex", "read of a pipe", "recv with time-out", "accept with time-out", "accept",
  "sigtimedwait", "wait4", "semtimedop", "msgrcv", "io_uring_enter", "read of a timerfd", "sigsuspend",
  "fallocate", "splice by a worker of io_uring"};
static volatile int stop, word, never;
static unsigned long done[KINDS], bad[KINDS], early[KINDS];
static int pipes[2], spliced[2][2], timed_listener, plain_listener, sockets[2], semaphores, messages;
static struct sockaddr_in plain_address;
static pthread_t threads[KINDS];

static double now(void) { struct timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return t.tv_sec + t.tv_nsec / 1e9; }

static int listener(int milliseconds, struct sockaddr_in *address) {
  int fd = socket(AF_INET, SOCK_STREAM, 0);
  struct sockaddr_in any = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  socklen_t length = sizeof any;
  bind(fd, (void *)&any, sizeof any), listen(fd, 64), getsockname(fd, (void *)&any, &length);
  struct timeval tv = {0, milliseconds * 1000};
  setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &tv, sizeof tv);
  if (address) *address = any;
  return fd;
}

struct ring { int fd; unsigned *tail, *array, *completed_head, *completed_tail, mask, completed_mask; struct io_uring_sqe *entries; struct io_uring_cqe *completed; };
static int open_ring(struct ring *r) {
  struct io_uring_params p = {0};
  r->fd = syscall(SYS_io_uring_setup, 4, &p);
  if (r->fd < 0) return 0;
  char *s = mmap(0, p.sq_off.array + p.sq_entries * 4, 3, MAP_SHARED, r->fd, IORING_OFF_SQ_RING);
  char *c = mmap(0, p.cq_off.cqes + p.cq_entries * sizeof *r->completed, 3, MAP_SHARED, r->fd, IORING_OFF_CQ_RING);
  r->entries = mmap(0, p.sq_entries * sizeof *r->entries, 3, MAP_SHARED, r->fd, IORING_OFF_SQES);
  r->tail = (void *)(s + p.sq_off.tail), r->array = (void *)(s + p.sq_off.array), r->mask = *(unsigned *)(s + p.sq_off.ring_mask);
  r->completed_head = (void *)(c + p.cq_off.head), r->completed_tail = (void *)(c + p.cq_off.tail);
  r->completed = (void *)(c + p.cq_off.cqes), r->completed_mask = *(unsigned *)(c + p.cq_off.ring_mask);
  return 1;
}
/* Does one request and waits for it. Returns what the wait returned; -2 if it ended too early. */
static int in_ring(struct ring *r, const struct io_uring_sqe *request, int *result) {
  unsigned at = *r->tail & r->mask;
  r->entries[at] = *request, r->array[at] = at;
  __atomic_store_n(r->tail, *r->tail + 1, __ATOMIC_RELEASE);
  if (syscall(SYS_io_uring_enter, r->fd, 1, 0, 0, 0, 0) != 1) return -1;
  int waited = syscall(SYS_io_uring_enter, r->fd, 0, 1, IORING_ENTER_GETEVENTS, 0, 0);
  if (__atomic_load_n(r->completed_tail, __ATOMIC_ACQUIRE) != *r->completed_head + 1) return waited ? waited : -2;
  *result = r->completed[*r->completed_head & r->completed_mask].res;
  ++*r->completed_head;
  return waited;
}
static int wait_in_ring(struct ring *r, struct timespec *t) {
  struct __kernel_timespec k = {t->tv_sec, t->tv_nsec};
  struct io_uring_sqe request = {.opcode = IORING_OP_TIMEOUT, .fd = -1, .addr = (uintptr_t)&k, .len = 1};
  int result;
  return in_ring(r, &request, &result);
}
/* Always done by a worker, which waits until there is a byte. */
static int splice_in_ring(struct ring *r) {
  struct io_uring_sqe request = {.opcode = IORING_OP_SPLICE, .fd = spliced[1][1], .splice_fd_in = spliced[0][0],
    .off = -1, .splice_off_in = -1, .len = 1};
  int result = 0, waited = in_ring(r, &request, &result);
  char c;
  if (waited == 0 && result == 1 && read(spliced[1][0], &c, 1) != 1) return -3;
  return waited ? waited : result - 1;
}

static void on_user(int signal) { (void)signal; }

static void *block(void *argument) {
  long kind = (long)argument;
  int poller = epoll_create1(0), timer = timerfd_create(CLOCK_MONOTONIC, 0);
  struct pollfd nothing = {-1, 0, 0};
  struct epoll_event event;
  struct ring ring;
  int needs_ring = kind == IO_URING || kind == RING_SPLICE, has_ring = needs_ring && open_ring(&ring);
  sigset_t none, user;
  /* The signal that ends the program is for its first thread. */
  sigemptyset(&none), sigaddset(&none, SIGTERM), sigemptyset(&user), sigaddset(&user, SIGUSR2);
  if (needs_ring && !has_ring) { done[kind] = 1; return 0; }
  do {
    struct timespec t = {0, 20000000};
    struct timeval tv = {0, 20000};
    double start = now();
    int r = 0, timed = 1, expected = 0;
    char c;
    errno = 0;
    switch (kind) {
    case NANOSLEEP: r = syscall(SYS_nanosleep, &t, 0); break;
    case CLOCK_NANOSLEEP:
      clock_gettime(CLOCK_MONOTONIC, &t), t.tv_nsec += 20000000;
      if (t.tv_nsec >= 1000000000) t.tv_nsec -= 1000000000, t.tv_sec++;
      r = clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, 0);
      break;
    case POLL: r = poll(&nothing, 1, 20); break;
    case PPOLL: r = ppoll(&nothing, 1, &t, &none); break;
    case SELECT: r = select(0, 0, 0, 0, &tv); break;
    /* The kernel cannot write the time that is left there, and returns EINTR to any signal. */
    case SELECT_CONSTANT: { static const struct timeval constant = {0, 20000}; r = syscall(SYS_select, 0, 0, 0, 0, &constant); break; }
    case PSELECT: r = pselect(0, 0, 0, 0, &t, &none); break;
    case EPOLL_WAIT: r = epoll_wait(poller, &event, 1, 20); break;
    case EPOLL_PWAIT: r = epoll_pwait(poller, &event, 1, 20, &none); break;
    case FUTEX_TIMED: r = syscall(SYS_futex, &never, FUTEX_WAIT, 0, &t, 0, 0), expected = ETIMEDOUT; break;
    case FUTEX_PLAIN: r = syscall(SYS_futex, &word, FUTEX_WAIT, 0, 0, 0, 0), timed = 0; if (errno == EAGAIN) r = 0; break;
    case PIPE_READ: r = read(pipes[0], &c, 1) - 1, timed = 0; break;
    case RECV_TIMED: r = recv(sockets[0], &c, 1, 0), expected = EAGAIN; break;
    case ACCEPT_TIMED: r = accept(timed_listener, 0, 0), expected = EAGAIN; break;
    case ACCEPT_PLAIN: r = accept(plain_listener, 0, 0), timed = 0; if (r >= 0) close(r), r = 0; break;
    case SIGTIMEDWAIT: r = sigtimedwait(&user, 0, &t), expected = EAGAIN; break;
    case WAIT4: r = wait4(-1, 0, 0, 0), timed = 0; if (r > 0 || errno == ECHILD) r = 0; break;
    case SEMTIMEDOP: { struct sembuf down = {0, -1, 0}; r = semtimedop(semaphores, &down, 1, &t), expected = EAGAIN; break; }
    case MSGRCV: { struct { long type; char text[8]; } m; r = msgrcv(messages, &m, 8, 0, 0) - 1, timed = 0; break; }
    case IO_URING: r = wait_in_ring(&ring, &t); break;
    case RING_SPLICE: r = splice_in_ring(&ring), timed = 0; break;
    case TIMERFD: {
      struct itimerspec once = {.it_value = t};
      uint64_t expirations;
      timerfd_settime(timer, 0, &once, 0);
      r = read(timer, &expirations, 8) - 8;
      break;
    }
    /* Must end with EINTR: by its handler, and not before. */
    case SIGSUSPEND: sigfillset(&none), sigdelset(&none, SIGUSR2), r = sigsuspend(&none), expected = EINTR, timed = 0; break;
    /* Runs for milliseconds, and returns EINTR to any signal. Its memory goes at once, although children have the file, too. */
    case FALLOCATE: {
      int fd = memfd_create("fallocated", 0);
      r = fallocate(fd, 0, 0, 64 << 20), timed = 0;
      if (ftruncate(fd, 0)) abort();
      close(fd), usleep(20000);
      break;
    }
    }
    if (expected && r < 0 && errno == expected) r = 0;
    double took = now() - start;
    /* These two count ticks, which a CPU that stood still makes up for at once. */
    double least = kind == RECV_TIMED || kind == ACCEPT_TIMED ? .008 : .0195;
    if (r || (timed && took < least)) {
      unsigned long *count = r < 0 && errno == EINTR ? early : bad;
      if (!count[kind]++) fprintf(stderr, "%s: %d, errno %d, after %.4f s\n", names[kind], r, errno, took);
    }
    done[kind]++;
    hooked(kind);
  } while (!stop);
  return 0;
}

static void on_term(int signal) { (void)signal, stop = 1; }

/* Wakes those that wait for somebody. */
static void wake(void) {
  struct { long type; char text[8]; } m = {1, ""};
  if (write(pipes[1], "x", 1) != 1 || write(spliced[0][1], "x", 1) != 1) abort();
  syscall(SYS_futex, &word, FUTEX_WAKE, 9, 0, 0, 0);
  msgsnd(messages, &m, 1, IPC_NOWAIT);
  int fd = socket(AF_INET, SOCK_STREAM, 0);
  connect(fd, (void *)&plain_address, sizeof plain_address), close(fd);
  pthread_kill(threads[SIGSUSPEND], SIGUSR2);
  /* Their ends are told to the thread that forks them, which is the first, as in most programs. */
  if (!fork()) { usleep(50000); _exit(0); }
}

int main(void) {
  struct sigaction action = {.sa_handler = on_user};
  sigaction(SIGUSR2, &action, 0);
  action.sa_handler = on_term, sigaction(SIGTERM, &action, 0);
  semaphores = semget(IPC_PRIVATE, 1, 0600), messages = msgget(IPC_PRIVATE, 0600);
  timed_listener = listener(20, 0), plain_listener = listener(0, &plain_address);
  struct timeval tv = {0, 20000};
  if (pipe(pipes) || pipe(spliced[0]) || pipe(spliced[1]) || socketpair(AF_UNIX, SOCK_STREAM, 0, sockets)) return 2;
  setsockopt(sockets[0], SOL_SOCKET, SO_RCVTIMEO, &tv, sizeof tv);
  sigset_t blocked;
  sigemptyset(&blocked), sigaddset(&blocked, SIGUSR2), sigaddset(&blocked, SIGTERM);
  pthread_sigmask(SIG_BLOCK, &blocked, 0);
  for (long i = 0; i < KINDS; i++) pthread_create(&threads[i], 0, block, (void *)i);
  sigdelset(&blocked, SIGUSR2), pthread_sigmask(SIG_UNBLOCK, &blocked, 0);
  printf("READY %lx\n", (unsigned long)hooked), fflush(stdout);
  while (!stop) usleep(20000), wake();
  /* On a busy machine, some threads may not have made a call yet. */
  for (int i = 0, missing = 0; i < 10 || (missing && i < 3000); i++) {
    word = 1, usleep(20000), wake(), missing = 0;
    for (int k = 0; k < KINDS; k++) missing |= !done[k];
  }
  int any = 0;
  unsigned long ended = 0;
  for (int i = 0; i < KINDS; i++) ended += early[i];
  for (int i = 0; i < KINDS; i++) if (bad[i] || !done[i]) printf("%s %s %lu of %lu; ", any++ ? "" : "BAD", names[i], bad[i], done[i]);
  semctl(semaphores, 0, IPC_RMID), msgctl(messages, IPC_RMID, 0);
  if (!any) printf(ended ? "EARLY %lu" : "OK calls %lu", ended ? ended : done[NANOSLEEP]);
  puts(""), fflush(stdout);
  _exit(any ? 3 : ended ? 4 : 0);
}

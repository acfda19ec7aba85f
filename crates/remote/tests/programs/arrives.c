/* Says that it has arrived, and how: its arguments, its stack's alignment, and what it does at its end. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
static void end(void) { puts("END"); }
int main(int count, char **arguments) {
  atexit(end);
  printf("%d %s %d\n", count, arguments[count - 1], (int)((uintptr_t)__builtin_frame_address(0) % 8));
  return 7;
}

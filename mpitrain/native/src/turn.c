/* One thread of a rank at a time exchanges; Python's threads take the same turn (`world/agreement.py`). */
#include "native.h"

/* Takes the turn if it is free, else tells who has it that others came. Returns whether it was free. */
int mpitrain_take_turn(int64_t *turn) {
    int64_t free = 0;
    if (__atomic_compare_exchange_n(&turn[TAKEN], &free, 1, 0, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED))
        return 1;
    __atomic_store_n(&turn[OTHERS_CAME], 1, __ATOMIC_RELEASE);
    return 0;
}

void mpitrain_give_turn(int64_t *turn) {
    __atomic_store_n(&turn[TAKEN], 0, __ATOMIC_RELEASE);
}

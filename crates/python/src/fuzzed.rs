//! Replays inputs of the fuzz target `python`, variants of them, and its seeds.

use crate::debug_offsets;

#[path = "../../../fuzz/shared/damage.rs"]
mod damage;
#[path = "../../../fuzz/shared/seeds.rs"]
mod seeds;
#[path = "../../../fuzz/shared/python.rs"]
mod shared;

#[test]
fn seeds_of_python_are_checked() {
    seeds::replay("python", shared::check);
}

#[test]
fn inputs_of_the_fuzz_target_are_checked() {
    let (memory, address) = crate::code::tests::sound();
    for version in [11_u8, 12] {
        let mut input = vec![version];
        input.extend(address.to_le_bytes());
        for (start, bytes) in &memory {
            shared::memory::piece(&mut input, *start, bytes);
        }
        damage::replay("python", &format!("code-3.{version}"), &input, shared::check);
    }
    let table = [vec![14], debug_offsets::tests::fourteen()].concat();
    damage::replay("python", "offsets-3.14", &table, shared::check);
    // Frames of two invocations, which also serve as lines of any format.
    let frame = |code: u64, flags: u32| {
        [
            code.to_le_bytes(),
            7_u64.to_le_bytes(),
            [200_u32, flags].map(u32::to_le_bytes).as_flattened().try_into().expect("eight bytes"),
        ]
        .concat()
    };
    let frames = [vec![12], frame(1, 0), frame(9, 3), frame(2, 1), frame(9, 3)].concat();
    damage::replay("python", "frames-3.12", &frames, shared::check);
}

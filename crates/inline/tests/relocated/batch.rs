//! The functions of a batch, where their instructions are, and which of them can be compared.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use heapbpf_inline::Plan;
use heapbpf_inline::abi::{Function, HEADER, Header, STUB_BYTES};
use iced_x86::{
    Decoder, DecoderOptions, FlowControl, Instruction, InstructionInfoFactory, Mnemonic, OpAccess, OpKind, Register,
};
use zerocopy::FromBytes as _;

use crate::{BLOB, Original, REFERRED_BYTES, TEXT, TEXT_SPAN};

/// A hooked function.
pub struct Relocated {
    /// Where its displaced instructions are.
    pub at: u64,
    /// The displaced instructions, and the copied ones.
    pub instructions: Vec<Instruction>,
    /// Where these instructions are in the blob.
    places: Vec<u64>,
    /// How many of them are copied: their originals stay in place.
    pub copied: usize,
}

impl Relocated {
    /// Address of its first instruction.
    pub fn entry(&self) -> u64 {
        self.instructions[0].ip()
    }
}

/// The hooked functions of a batch.
pub struct Batch {
    /// By the address of their first instruction.
    pub hooked: BTreeMap<u64, Relocated>,
    /// The original address of each instruction in the blob.
    pub places: HashMap<u64, u64>,
}

impl Batch {
    /// The functions that the plan hooks.
    pub fn of(plan: &Plan, originals: &[Original]) -> Self {
        let of = |(index, wanted): (usize, &usize)| {
            let at = HEADER as usize + size_of::<Header>() + index * size_of::<Function>();
            let (function, _) = Function::read_from_prefix(&plan.file[at..]).expect("it is in the file");
            let Original { address, bytes } = &originals[*wanted];
            assert_eq!(function.address, *address);
            let displaced = &bytes[..function.displaced as usize];
            let displaced = Decoder::with_ip(64, displaced, *address, DecoderOptions::NONE).into_iter().count();
            let original = Decoder::with_ip(64, bytes, *address, DecoderOptions::NONE).into_iter();
            let at = BLOB + u64::from(function.original);
            let blob = &plan.file[function.original as usize..];
            let blob: Vec<Instruction> =
                Decoder::with_ip(64, blob, at, DecoderOptions::NONE).into_iter().take(STUB_BYTES as usize).collect();
            let mut relocated = Relocated { at, instructions: Vec::new(), places: Vec::new(), copied: 0 };
            for (index, instruction) in original.enumerate() {
                let is_there = blob.get(index).is_some_and(|there| there.mnemonic() == instruction.mnemonic());
                let goes_on = relocated.instructions.last().is_none_or(|last| {
                    !matches!(last.flow_control(), FlowControl::Return | FlowControl::UnconditionalBranch)
                });
                if index >= displaced && !(is_there && goes_on && index == relocated.places.len()) {
                    break;
                }
                relocated.copied += usize::from(index >= displaced);
                relocated.places.extend(is_there.then(|| blob[index].ip()));
                relocated.instructions.push(instruction);
            }
            (*address, relocated)
        };
        let hooked: BTreeMap<u64, Relocated> = plan.hooked.iter().enumerate().map(of).collect();
        let copies = hooked.values().flat_map(|function| {
            function.places.iter().zip(&function.instructions).map(|(place, instruction)| (*place, instruction.ip()))
        });
        let places = plan.moved.iter().map(|(instruction, place)| (*place, *instruction)).chain(copies).collect();
        Self { hooked, places }
    }

    /// Whether the address is within one of the functions' instructions.
    fn holds(&self, address: u64) -> bool {
        let before = self.hooked.range(..=address).next_back();
        before.and_then(|(_, function)| function.instructions.last()).is_some_and(|last| address < last.next_ip())
    }

    /// The displaced instructions of a function, and of the functions that they lead to.
    pub fn reached(&self, entry: u64) -> Vec<Instruction> {
        let (mut reached, mut ahead, mut known) = (Vec::new(), vec![entry], BTreeSet::from([entry]));
        while let Some(function) = ahead.pop().and_then(|entry| self.hooked.get(&entry)) {
            reached.extend(&function.instructions);
            let branches = function.instructions.iter().filter(|it| it.op0_kind() == OpKind::NearBranch64);
            let targets = branches.map(Instruction::near_branch_target);
            ahead.extend(targets.filter(|target| self.hooked.contains_key(target) && known.insert(*target)));
        }
        reached
    }
}

/// Why running a function would show nothing; `None` if it shows something.
pub fn left_out(batch: &Batch, instructions: &[Instruction]) -> Option<&'static str> {
    let varies = |instruction: &Instruction| {
        use Mnemonic::{Cpuid, Rdpid, Rdpmc, Rdrand, Rdseed, Rdtsc, Rdtscp, Xgetbv};
        [Cpuid, Rdpid, Rdpmc, Rdrand, Rdseed, Rdtsc, Rdtscp, Xgetbv].contains(&instruction.mnemonic())
    };
    let stores_place = |instruction: &Instruction| {
        use Mnemonic::{Fnsave, Fnstenv, Fxsave, Fxsave64, Xsave, Xsave64, Xsavec, Xsavec64};
        [Fnsave, Fnstenv, Fxsave, Fxsave64, Xsave, Xsave64, Xsavec, Xsavec64].contains(&instruction.mnemonic())
    };
    let leads_to_entry = |instruction: &Instruction| {
        instruction.op0_kind() == OpKind::NearBranch64 && instruction.near_branch_target() == instructions[0].ip()
    };
    let refers_far = |instruction: &Instruction| {
        let address = instruction.ip_rel_memory_address();
        let referred = address..address.saturating_add(REFERRED_BYTES as u64);
        let is_read = instruction.is_ip_rel_memory_operand() && instruction.mnemonic() != Mnemonic::Lea;
        is_read && (referred.start < TEXT || referred.end > TEXT + TEXT_SPAN as u64)
    };
    let leads_back = |instruction: &Instruction| {
        let target = instruction.near_branch_target();
        let is_ahead = instructions.iter().any(|other| other.ip() == target) && target > instruction.ip();
        let is_back = batch.holds(target) && !is_ahead;
        instruction.op0_kind() == OpKind::NearBranch64 && is_back
    };
    let has_own_address =
        |instruction: &Instruction| instruction.is_ip_rel_memory_operand() && instruction.mnemonic() == Mnemonic::Lea;
    let writes_through_register = |instruction: &Instruction| {
        let mut infos = InstructionInfoFactory::new();
        let memory = infos.info(instruction).used_memory();
        let is_written = |access| !matches!(access, OpAccess::Read | OpAccess::CondRead);
        memory.iter().any(|used| is_written(used.access()) && ![Register::RIP, Register::RSP].contains(&used.base()))
    };
    let writes_own = instructions.iter().any(has_own_address) && instructions.iter().any(writes_through_register);
    let leads_anywhere = |instruction: &Instruction| {
        use FlowControl::{IndirectBranch, IndirectCall, Return};
        [IndirectBranch, IndirectCall, Return].contains(&instruction.flow_control())
    };
    // They may lead into the data, which may be anything.
    let runs_own = instructions.iter().any(has_own_address) && instructions.iter().any(leads_anywhere);
    if runs_own {
        Some("it may jump to an address that it makes")
    } else if instructions.iter().any(leads_back) {
        Some("it jumps back, or between instructions")
    } else if writes_own {
        Some("it writes through an address that it makes")
    } else if instructions.iter().any(varies) {
        Some("what it reads varies")
    } else if instructions.iter().any(stores_place) {
        Some("it stores where the last instruction of the x87 was")
    } else if instructions.iter().any(leads_to_entry) {
        Some("it jumps to its entry")
    } else if instructions.iter().any(refers_far) {
        Some("it refers to memory that is not mapped here")
    } else {
        None
    }
}

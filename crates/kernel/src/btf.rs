//! The kernel's type information (BTF): offsets of structure members, and IDs of functions and tracepoints.

use std::path::Path;

use sampler_ebpf::abi::KernelOffsets;

use super::KernelError;

pub(super) const PATH: &str = "/sys/kernel/btf/vmlinux";
const MAGIC: u16 = 0xeb9f;
const HEADER_BYTES: usize = 24;
const MEMBER_BYTES: usize = 12;

/// BTF type kinds (kernel, Documentation/bpf/btf.rst).
mod kind {
    pub const INT: u32 = 1;
    pub const ARRAY: u32 = 3;
    pub const STRUCT: u32 = 4;
    pub const UNION: u32 = 5;
    pub const ENUM: u32 = 6;
    pub const TYPEDEF: u32 = 8;
    pub const VOLATILE: u32 = 9;
    pub const CONST: u32 = 10;
    pub const RESTRICT: u32 = 11;
    pub const FUNC: u32 = 12;
    pub const FUNC_PROTO: u32 = 13;
    pub const VAR: u32 = 14;
    pub const DATASEC: u32 = 15;
    pub const DECL_TAG: u32 = 17;
    pub const TYPE_TAG: u32 = 18;
    pub const ENUM64: u32 = 19;
}

struct Type<'a> {
    name: u32,
    info: u32,
    size_or_type: u32,
    tail: &'a [u8],
}

impl Type<'_> {
    const fn kind(&self) -> u32 {
        (self.info >> 24) & 31
    }
}

/// The kernel's type information, parsed.
pub struct KernelBtf<'a> {
    types: Vec<Type<'a>>,
    strings: &'a [u8],
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes.get(at..at.checked_add(4)?)?.try_into().ok()?))
}

/// Reads the running kernel's type information as raw bytes.
///
/// # Errors
/// The kernel was built without type information.
pub fn read() -> Result<Vec<u8>, KernelError> {
    std::fs::read(Path::new(PATH)).map_err(KernelError::NoBtf)
}

impl<'a> KernelBtf<'a> {
    /// Parses type information. `None` if its format is unknown.
    pub fn parse(bytes: &'a [u8]) -> Option<Self> {
        if bytes.len() < HEADER_BYTES || u16::from_ne_bytes([bytes[0], bytes[1]]) != MAGIC {
            return None;
        }
        let header = u32_at(bytes, 4)? as usize;
        let section = |offset_at: usize, length_at: usize| {
            let start = header.checked_add(u32_at(bytes, offset_at)? as usize)?;
            bytes.get(start..start.checked_add(u32_at(bytes, length_at)? as usize)?)
        };
        let (table, strings) = (section(8, 12)?, section(16, 20)?);
        // Type 0 is void.
        let mut types = vec![Type { name: 0, info: 0, size_or_type: 0, tail: &[] }];
        let mut at = 0;
        while at < table.len() {
            let (name, info, size_or_type) = (u32_at(table, at)?, u32_at(table, at + 4)?, u32_at(table, at + 8)?);
            let count = (info & 0xffff) as usize;
            let tail = match (info >> 24) & 31 {
                kind::INT | kind::VAR | kind::DECL_TAG => 4,
                kind::ARRAY => 12,
                kind::STRUCT | kind::UNION | kind::DATASEC | kind::ENUM64 => 12 * count,
                kind::ENUM | kind::FUNC_PROTO => 8 * count,
                _ => 0,
            };
            let start = at + 12;
            types.push(Type { name, info, size_or_type, tail: table.get(start..start + tail)? });
            at = start + tail;
        }
        Some(Self { types, strings })
    }

    fn name(&self, at: u32) -> &'a [u8] {
        let rest = self.strings.get(at as usize..).unwrap_or_default();
        &rest[..rest.iter().position(|byte| *byte == 0).unwrap_or(rest.len())]
    }

    /// Finds a member's offset in bytes, and its type. Anonymous members are searched, too.
    fn member(&self, id: u32, name: &str, depth: usize) -> Option<(u64, u32)> {
        let id = self.without_modifiers(id)?;
        let this = self.types.get(id as usize)?;
        if !matches!(this.kind(), kind::STRUCT | kind::UNION) || depth > 16 {
            return None;
        }
        let has_bitfields = this.info >> 31 != 0;
        this.tail.chunks_exact(MEMBER_BYTES).find_map(|member| {
            let (member_name, member_type) = (u32_at(member, 0)?, u32_at(member, 4)?);
            let mut bits = u32_at(member, 8)?;
            if has_bitfields {
                bits &= 0x00ff_ffff;
            }
            let offset = u64::from(bits / 8);
            if member_name == 0 {
                self.member(member_type, name, depth + 1).map(|(inner, of_type)| (offset + inner, of_type))
            } else {
                (self.name(member_name) == name.as_bytes()).then_some((offset, member_type))
            }
        })
    }

    fn without_modifiers(&self, mut id: u32) -> Option<u32> {
        for _ in 0..16 {
            let this = self.types.get(id as usize)?;
            match this.kind() {
                kind::TYPEDEF | kind::VOLATILE | kind::CONST | kind::RESTRICT | kind::TYPE_TAG => {
                    id = this.size_or_type
                }
                _ => return Some(id),
            }
        }
        None
    }

    fn find(&self, wanted: u32, name: &str) -> Option<u32> {
        let at = self.types.iter().position(|this| this.kind() == wanted && self.name(this.name) == name.as_bytes())?;
        u32::try_from(at).ok()
    }

    /// A member's offset in bytes. `path` may lead through nested structures (`se.load.weight`).
    pub fn member_offset(&self, structure: &str, path: &str) -> Option<u64> {
        let mut id = self.find(kind::STRUCT, structure)?;
        let mut offset = 0;
        for name in path.split('.') {
            let (inner, of_type) = self.member(id, name, 0)?;
            offset += inner;
            id = of_type;
        }
        Some(offset)
    }

    /// The ID of a kernel function.
    pub fn function_id(&self, name: &str) -> Option<u32> {
        self.find(kind::FUNC, name)
    }

    /// The ID of the type of a raw tracepoint's arguments.
    pub fn tracepoint_id(&self, name: &str) -> Option<u32> {
        self.find(kind::TYPEDEF, &format!("btf_trace_{name}"))
    }

    /// The structure offsets that the BPF programs need.
    ///
    /// # Errors
    /// The kernel lacks a member, which means that heapbpf does not know this kernel's layout.
    pub fn offsets(&self) -> Result<KernelOffsets, KernelError> {
        let offset = |structure: &'static str, path: &'static str| {
            self.member_offset(structure, path).ok_or(KernelError::NoMember { structure, path })
        };
        let optional = |structure, path| self.member_offset(structure, path).unwrap_or(KernelOffsets::ABSENT);
        Ok(KernelOffsets {
            task_mm: offset("task_struct", "mm")?,
            task_group_leader: offset("task_struct", "group_leader")?,
            task_start_boottime: offset("task_struct", "start_boottime")?,
            task_self_exec_id: offset("task_struct", "self_exec_id")?,
            task_tgid: offset("task_struct", "tgid")?,
            task_comm: offset("task_struct", "comm")?,
            task_signal: offset("task_struct", "signal")?,
            task_thread_pointer: offset("task_struct", heapbpf_host::arch::THREAD_POINTER)?,
            signal_live: offset("signal_struct", "live")?,
            mm_owner: optional("mm_struct", "owner"),
            mm_start_stack: offset("mm_struct", "start_stack")?,
            mm_brk: offset("mm_struct", "brk")?,
            mm_total_vm: offset("mm_struct", "total_vm")?,
            mm_data_vm: offset("mm_struct", "data_vm")?,
            signal_rlim: offset("signal_struct", "rlim")?,
            mm_users: offset("mm_struct", "mm_users")?,
            task_cpu: offset("task_struct", "se.sum_exec_runtime")?,
            signal_cpu: offset("signal_struct", "sum_sched_runtime")?,
            // Every kernel with uretprobe(2) has this function, which came with it in Linux 6.11.
            task_syscall_work: match self.function_id("uprobe_get_trampoline_vaddr") {
                Some(_) => optional("task_struct", "thread_info.syscall_work"),
                None => KernelOffsets::ABSENT,
            },
        })
    }
}

#[cfg(test)]
mod tests {
    use heapbpf_testing::skipped;

    use super::*;

    #[test]
    fn reads_the_running_kernel() {
        if heapbpf_testing::is_emulated("the kernel's types are another machine's") {
            return;
        }
        let Ok(bytes) = read() else {
            skipped("this kernel has no BTF");
            return;
        };
        let btf = KernelBtf::parse(&bytes).unwrap();
        let offsets = btf.offsets().unwrap();
        // mm and comm are members of task_struct, whose size is between 1 KiB and 64 KiB.
        for offset in [offsets.task_mm, offsets.task_comm, offsets.task_thread_pointer] {
            assert!((8..65536).contains(&offset), "{offsets:?}");
        }
        assert_eq!(btf.member_offset("list_head", "prev"), Some(8));
        assert_eq!(btf.member_offset("list_head", "none"), None);
        assert!(btf.function_id("bpf_iter_task").is_some());
        assert!(btf.tracepoint_id("sched_process_free").is_some());
    }

    #[test]
    fn refuses_what_is_cut_short_without_panic() {
        let Ok(bytes) = read() else {
            skipped("this kernel has no BTF");
            return;
        };
        for length in [0, 1, 23, 24, 25, 100, 4095, bytes.len() / 2, bytes.len() - 1] {
            assert!(KernelBtf::parse(&bytes[..length]).is_none(), "{length} bytes");
        }
    }
}

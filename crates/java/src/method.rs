//! Java methods: class, name, file and line numbers.

use heapbpf_elf::{Memory, escaped};

use crate::layout::Vm;
use crate::memory::{self, Fields, ReadError, Stream, digest};

/// Maximum length of a class or method name, bytes. Longer ones are truncated.
const LONGEST_NAME: u16 = 1024;
/// Maximum size of a method's line numbers, bytes.
const MOST_LINE_BYTES: u64 = 1 << 16;
/// A byte of the line numbers that two full numbers follow.
const WHOLE: u8 = 0xff;

/// A Java method.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Method {
    /// Class and name, such as `java.util.zip.Deflater.deflate`.
    pub name: String,
    /// Path of the source file relative to the source root, as far as the class states it, such as
    /// `java/util/zip/Deflater.java`.
    pub file: Option<String>,
    /// Address of its first bytecode.
    pub bytecodes: u64,
    /// Size of its bytecodes, bytes; 0 if it is native or abstract.
    pub size: u16,
    /// A checksum that almost certainly changes if something else is at its address.
    pub check: u64,
    lines: Box<[u8]>,
    without_zeros: bool,
}

/// The fields that distinguish a method from another one at its address.
struct Head {
    constant: u64,
    pool: u64,
    holder: u64,
    bytes: Vec<u8>,
    check: u64,
}

impl Head {
    fn read(memory: &dyn Memory, vm: &Vm, address: u64) -> Result<Self, ReadError> {
        let at = vm.layout.method;
        let constant = memory::word(memory, address.wrapping_add(at.constant.into()))?;
        if address == 0 || constant == 0 || !address.is_multiple_of(8) || !constant.is_multiple_of(8) {
            return Err(ReadError::Malformed);
        }
        let bytes = memory::bytes(memory, constant, at.constant_bytes as usize)?;
        let fields = Fields(&bytes);
        let pool = fields.u64(at.pool)?;
        let holder = memory::word(memory, pool.wrapping_add(at.holder.into()))?;
        let words = [address, constant, pool, holder, fields.u16(at.name)?.into(), fields.u16(at.code_size)?.into()];
        Ok(Self { constant, pool, holder, check: digest(&words), bytes })
    }
}

impl Method {
    /// Returns the checksum of the method at an address.
    ///
    /// # Errors
    /// [`ReadError`]
    pub fn check(memory: &dyn Memory, vm: &Vm, address: u64) -> Result<u64, ReadError> {
        Head::read(memory, vm, address).map(|head| head.check)
    }

    /// Reads the method at an address.
    ///
    /// # Errors
    /// [`ReadError`]
    pub fn read(memory: &dyn Memory, vm: &Vm, address: u64) -> Result<Self, ReadError> {
        let at = vm.layout.method;
        let head = Head::read(memory, vm, address)?;
        let fields = Fields(&head.bytes);
        let class = memory::word(memory, head.holder.wrapping_add(at.class_name.into()))?;
        let class = symbol(memory, vm, class)?;
        let name = constant(memory, vm, head.pool, fields.u16(at.name)?)?;
        let file = at.source_file.and_then(|place| {
            let index = memory::bytes(memory, head.pool.wrapping_add(place.into()), 2).ok()?;
            let index = Fields(&index).u16(0).ok().filter(|index| *index != 0)?;
            constant(memory, vm, head.pool, index).ok()
        });
        let size = fields.u16(at.code_size)?;
        let bytecodes = head.constant.wrapping_add(at.constant_bytes.into());
        let (flags, has_lines) = at.flags;
        let lines = if fields.u16(flags)? & has_lines == 0 {
            Box::default()
        } else {
            let end = u64::from(fields.u32(at.constant_words)?) * 8;
            let before = u64::from(at.constant_bytes) + u64::from(size);
            let bytes = end.checked_sub(before).ok_or(ReadError::Malformed)?.min(MOST_LINE_BYTES);
            memory::bytes(memory, head.constant.wrapping_add(before), bytes as usize)?.into()
        };
        // Meanwhile the class may have been unloaded and its memory reused.
        if Head::read(memory, vm, address)?.check != head.check {
            return Err(ReadError::Malformed);
        }
        let package = class.rsplit_once('/').map_or("", |(package, _)| package);
        let separator = if package.is_empty() { "" } else { "/" };
        Ok(Self {
            file: file.filter(|file| !file.is_empty()).map(|file| format!("{package}{separator}{file}")),
            name: format!("{}.{name}", shown(&class)),
            bytecodes,
            size,
            check: head.check,
            lines,
            without_zeros: vm.layout.without_zeros,
        })
    }

    /// Returns the index of the bytecode at an address; `None` if it does not belong to the method.
    #[must_use]
    pub fn index_of(&self, bytecode: u64) -> Option<u32> {
        let index = bytecode.checked_sub(self.bytecodes)?;
        (index < self.size.into()).then_some(index as u32)
    }

    /// Returns the line of the bytecode at an index.
    #[must_use]
    pub fn line(&self, index: u32) -> Option<u32> {
        let mut table = Stream::new(&self.lines, self.without_zeros);
        let (mut bytecode, mut line) = (0i64, 0i64);
        let mut best = None;
        loop {
            match table.byte()? {
                0 => break,
                WHOLE => {
                    bytecode += i64::from(table.signed()?);
                    line += i64::from(table.signed()?);
                }
                both => {
                    bytecode += i64::from(both >> 3);
                    line += i64::from(both & 7);
                }
            }
            // Compilers write the entries in any order. The nearest one at or before the index counts.
            if (0..=i64::from(index)).contains(&bytecode) && best.is_none_or(|(at, _)| at <= bytecode) {
                best = Some((bytecode, line));
            }
        }
        best.and_then(|(_, line)| u32::try_from(line).ok()).filter(|line| *line > 0)
    }

    /// Memory that it uses, bytes.
    #[must_use]
    pub fn held_bytes(&self) -> usize {
        size_of::<Self>() + self.name.len() + self.file.as_ref().map_or(0, String::len) + self.lines.len()
    }
}

/// Returns a class name as in the source. The name of a hidden class, such as a lambda's, contains an address that
/// differs from run to run; it is cut off.
fn shown(class: &str) -> String {
    let hidden = class.find("/0x").or_else(|| class.find("+0x"));
    class[..hidden.unwrap_or(class.len())].replace('/', ".")
}

/// Returns a symbol of a constant pool by index.
fn constant(memory: &dyn Memory, vm: &Vm, pool: u64, index: u16) -> Result<String, ReadError> {
    let at = vm.layout.method;
    let length = memory::int(memory, pool.wrapping_add(at.pool_length.into()))?;
    if u32::from(index) >= length {
        return Err(ReadError::Malformed);
    }
    let place = pool.wrapping_add(at.pool_bytes.into()).wrapping_add(u64::from(index) * 8);
    symbol(memory, vm, memory::word(memory, place)?)
}

fn symbol(memory: &dyn Memory, vm: &Vm, address: u64) -> Result<String, ReadError> {
    let (length, body) = vm.layout.method.symbol;
    let length = memory::bytes(memory, address.wrapping_add(length.into()), 2)?;
    let length = Fields(&length).u16(0)?.min(LONGEST_NAME);
    let bytes = memory::bytes(memory, address.wrapping_add(body.into()), length.into())?;
    if bytes.is_empty() || bytes.contains(&0) {
        return Err(ReadError::Malformed);
    }
    Ok(escaped(&bytes))
}

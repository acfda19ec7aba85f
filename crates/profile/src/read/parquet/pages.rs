//! The values of one column of a Parquet file, page by page. The library finds and unpacks the pages. They are decoded
//! here, because the library's own decoders panic on damaged pages and allocate as much memory as a few bytes claim.

use std::sync::Arc;

use bytes::Bytes;
use parquet::basic::{ConvertedType, Encoding, LogicalType, Repetition, TimeUnit, Type};
use parquet::column::page::{Page, PageReader};
use parquet::schema::types::ColumnDescriptor;

use super::{ContentError, MOST_FRAMES, damaged, too_many};

/// A value of the table.
#[derive(Clone, Debug)]
pub(super) enum Cell {
    Null,
    Text(Arc<str>),
    Whole(i64),
    Real(f64),
    Flag(bool),
    /// Microseconds since 1970.
    Time(i64),
    /// A value of another type, which was not read.
    Other,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Kind {
    Text,
    Whole,
    Real,
    Flag,
    Time,
    Other,
}

fn kind(column: &ColumnDescriptor) -> Kind {
    use LogicalType::{Integer, String, Timestamp};
    match (column.physical_type(), column.logical_type_ref(), column.converted_type()) {
        (Type::BYTE_ARRAY, Some(String), _) | (Type::BYTE_ARRAY, None, ConvertedType::UTF8) => Kind::Text,
        (Type::INT64, Some(Integer(it)), _) if it.is_signed => Kind::Whole,
        (Type::INT64, Some(Timestamp(it)), _) if it.unit == TimeUnit::MICROS => Kind::Time,
        (Type::INT64, None, ConvertedType::NONE | ConvertedType::INT_64) => Kind::Whole,
        (Type::INT64, None, ConvertedType::TIMESTAMP_MICROS) => Kind::Time,
        (Type::DOUBLE, ..) => Kind::Real,
        (Type::BOOLEAN, ..) => Kind::Flag,
        _ => Kind::Other,
    }
}

/// The values of a column in a group of rows, in order.
pub(super) struct Column {
    kind: Kind,
    pages: Box<dyn PageReader>,
    /// Definition levels of a value that is present, and of a list element, which may be NULL.
    whole: u32,
    element: u32,
    is_list: bool,
    dictionary: Vec<Cell>,
    /// Number of levels left in the page, their repetition and definition levels, and the values.
    left: u32,
    repeated: Runs,
    defined: Runs,
    values: Values,
    /// The first level after a list.
    next: Option<Level>,
}

struct Level {
    repeats: bool,
    defined: u32,
    value: Cell,
}

/// The remaining values of a page.
enum Values {
    Plain(Bytes),
    /// Flags as single bits.
    Flags(Runs),
    Indices(Runs),
}

impl Column {
    pub(super) fn new(column: &ColumnDescriptor, pages: Box<dyn PageReader>) -> Self {
        let whole = u32::from(column.max_def_level().unsigned_abs());
        let is_optional = column.self_type().get_basic_info().repetition() == Repetition::OPTIONAL;
        Self {
            kind: kind(column),
            pages,
            whole,
            element: whole.saturating_sub(is_optional.into()),
            is_list: column.max_rep_level() > 0,
            dictionary: Vec::new(),
            left: 0,
            repeated: Runs::nothing(),
            defined: Runs::nothing(),
            values: Values::Plain(Bytes::new()),
            next: None,
        }
    }

    /// The value of the next row.
    pub(super) fn value(&mut self) -> Result<Cell, ContentError> {
        if self.kind == Kind::Other || self.is_list {
            return Ok(Cell::Other);
        }
        Ok(self.level()?.ok_or_else(ends_early)?.value)
    }

    /// The texts in the next row's list, with at most `most` levels.
    pub(super) fn texts(&mut self, most: usize) -> Result<Vec<Cell>, ContentError> {
        if !self.is_list {
            return Err(damaged("frames is not a list"));
        }
        if self.kind != Kind::Text {
            return Err(damaged("frames are not text"));
        }
        let mut level = match self.next.take() {
            Some(level) => level,
            None => self.level()?.ok_or_else(ends_early)?,
        };
        let mut texts = Vec::new();
        for _ in 0..most {
            if level.defined >= self.element {
                texts.push(level.value);
            }
            match self.level()? {
                Some(next) if next.repeats => level = next,
                next => {
                    self.next = next;
                    return Ok(texts);
                }
            }
        }
        Err(too_many())
    }

    fn level(&mut self) -> Result<Option<Level>, ContentError> {
        while self.left == 0 {
            let Some(page) = self.pages.get_next_page().map_err(damaged)? else { return Ok(None) };
            self.open(page).ok_or_else(ends_early)??;
        }
        self.left -= 1;
        let repeats = !self.is_list || self.repeated.next().ok_or_else(ends_early)? > 0;
        let defined = if self.whole > 0 { self.defined.next().ok_or_else(ends_early)? } else { 0 };
        let value = if defined < self.whole { Some(Cell::Null) } else { self.next_value() };
        Ok(Some(Level { repeats, defined, value: value.ok_or_else(ends_early)? }))
    }

    fn next_value(&mut self) -> Option<Cell> {
        match &mut self.values {
            Values::Plain(bytes) => plain(self.kind, bytes),
            Values::Flags(runs) => Some(Cell::Flag(runs.next()? == 1)),
            Values::Indices(runs) => self.dictionary.get(runs.next()? as usize).cloned(),
        }
    }

    /// Starts a page; `None` if its data ends early.
    fn open(&mut self, page: Page) -> Option<Result<(), ContentError>> {
        let (encoding, mut bytes) = match page {
            Page::DictionaryPage { mut buf, num_values, .. } => {
                self.dictionary.clear();
                if num_values as usize > MOST_FRAMES {
                    return Some(Err(too_many()));
                }
                for _ in 0..num_values {
                    self.dictionary.push(plain(self.kind, &mut buf)?);
                }
                return Some(Ok(()));
            }
            Page::DataPage { mut buf, num_values, encoding, def_level_encoding, rep_level_encoding, .. } => {
                self.left = num_values;
                for (runs, deepest, encoding) in [
                    (&mut self.repeated, u32::from(self.is_list), rep_level_encoding),
                    (&mut self.defined, self.whole, def_level_encoding),
                ] {
                    if deepest > 0 {
                        if encoding != Encoding::RLE {
                            return Some(Err(unknown(encoding)));
                        }
                        *runs = Runs::of(prefixed(&mut buf)?, deepest);
                    }
                }
                (encoding, buf)
            }
            Page::DataPageV2 { mut buf, num_values, encoding, def_levels_byte_len, rep_levels_byte_len, .. } => {
                self.left = num_values;
                self.repeated = Runs::of(first(&mut buf, rep_levels_byte_len as usize)?, self.is_list.into());
                self.defined = Runs::of(first(&mut buf, def_levels_byte_len as usize)?, self.whole);
                (encoding, buf)
            }
        };
        self.values = match encoding {
            Encoding::PLAIN if self.kind == Kind::Flag => Values::Flags(Runs::bits(bytes)),
            Encoding::PLAIN => Values::Plain(bytes),
            Encoding::RLE if self.kind == Kind::Flag => Values::Flags(Runs::of(prefixed(&mut bytes)?, 1)),
            Encoding::RLE_DICTIONARY | Encoding::PLAIN_DICTIONARY => {
                let width = first(&mut bytes, 1).map_or(0, |width| width[0]);
                Values::Indices(Runs { width: u32::from(width).min(32), ..Runs::of(bytes, 0) })
            }
            other => return Some(Err(unknown(other))),
        };
        Some(Ok(()))
    }
}

fn ends_early() -> ContentError {
    damaged("a column ends early")
}

fn unknown(encoding: Encoding) -> ContentError {
    damaged(format!("a column is encoded as {encoding}"))
}

/// Takes the first `length` bytes.
fn first(bytes: &mut Bytes, length: usize) -> Option<Bytes> {
    (length <= bytes.len()).then(|| bytes.split_to(length))
}

/// Takes bytes that are preceded by their length.
fn prefixed(bytes: &mut Bytes) -> Option<Bytes> {
    let length = first(bytes, 4)?;
    first(bytes, u32::from_le_bytes(length[..].try_into().ok()?) as usize)
}

/// Takes one value in plain encoding.
fn plain(kind: Kind, bytes: &mut Bytes) -> Option<Cell> {
    if kind == Kind::Text {
        let text = prefixed(bytes)?;
        return Some(Cell::Text(str::from_utf8(&text).ok()?.into()));
    }
    let value = <[u8; 8]>::try_from(&first(bytes, 8)?[..]).ok()?;
    Some(match kind {
        Kind::Whole => Cell::Whole(i64::from_le_bytes(value)),
        Kind::Real => Cell::Real(f64::from_le_bytes(value)),
        Kind::Time => Cell::Time(i64::from_le_bytes(value)),
        Kind::Text | Kind::Flag | Kind::Other => Cell::Other,
    })
}

/// Small numbers, as runs of one repeated number and runs of packed bits.
struct Runs {
    bytes: Bytes,
    /// Bits per number.
    width: u32,
    /// Numbers left in the run.
    left: u64,
    /// The number that the run repeats; `None` for a run of packed bits, the next of which is at `bit`.
    same: Option<u32>,
    bit: usize,
}

impl Runs {
    fn nothing() -> Self {
        Self::of(Bytes::new(), 0)
    }

    /// Numbers up to `largest`.
    fn of(bytes: Bytes, largest: u32) -> Self {
        Self { bytes, width: u32::BITS - largest.leading_zeros(), left: 0, same: None, bit: 0 }
    }

    /// A single run of bits.
    fn bits(bytes: Bytes) -> Self {
        Self { left: u64::MAX, ..Self::of(bytes, 1) }
    }

    fn next(&mut self) -> Option<u32> {
        while self.left == 0 {
            self.begin()?;
        }
        self.left -= 1;
        if let Some(same) = self.same {
            return Some(same);
        }
        let (bit, end) = (self.bit, self.bit + self.width as usize);
        let bytes = self.bytes.get(bit / 8..end.div_ceil(8))?;
        self.bit = end;
        let number = bytes.iter().rev().fold(0_u64, |number, byte| number << 8 | u64::from(*byte));
        Some((number >> (bit % 8) & ((1 << self.width) - 1)) as u32)
    }

    /// Starts a run.
    fn begin(&mut self) -> Option<()> {
        if self.same.take().is_none() {
            // Skips the bits of the previous run.
            let _ = first(&mut self.bytes, self.bit.div_ceil(8))?;
        }
        self.bit = 0;
        let mut header = 0;
        for shift in (0..35).step_by(7) {
            let byte = first(&mut self.bytes, 1)?[0];
            header |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                break;
            }
        }
        if header & 1 == 1 {
            self.left = (header >> 1) * 8;
            return Some(());
        }
        self.left = header >> 1;
        let number = first(&mut self.bytes, self.width.div_ceil(8) as usize)?;
        self.same = Some(number.iter().rev().fold(0, |number, byte| number << 8 | u32::from(*byte)));
        Some(())
    }
}

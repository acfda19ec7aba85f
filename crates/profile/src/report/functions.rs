//! The top functions, by what is allocated in them and in the functions that they call.

use std::collections::HashMap;

use super::figures::FigureTable;
use super::{Context, chain};
use crate::estimates::Pool;
use crate::intern::Interned;
use crate::report::figure::FigureText;
use crate::report::text::{Column, Style, clip};
use crate::units;

/// Lines of the section; empty if it was not requested or there are no functions.
pub(super) fn section(context: &Context) -> Vec<String> {
    let wanted = context.options.functions;
    if wanted == 0 {
        return Vec::new();
    }
    let functions = functions(context);
    if functions.is_empty() {
        return Vec::new();
    }
    let shown = &functions[..functions.len().min(wanted)];
    let columns = [Column::right("SELF", Style::Plain), Column::left("FUNCTION", Style::Name)];
    let mut table = FigureTable::new(context, &columns);
    for Function { name, pool, itself } in shown {
        let known = pool.knows(context.profile, context.sort);
        let itself = match context.sort.is_bytes() {
            _ if !known => FigureText::not_known().figure,
            true => units::bytes(*itself),
            false => units::count(*itself),
        };
        table.row(context, pool, vec![itself, clip(name, context.width / 3)]);
    }
    let about = format!(" · top {} of {} · stacks through them, each counted once", shown.len(), functions.len());
    let title = "By function";
    let about = clip(&about, context.width.saturating_sub(title.len()));
    let (header, rows) = table.lines(context);
    let mut lines = vec![context.heading(title) + &context.paint(Style::Dim, &about), header];
    lines.extend(rows);
    lines.extend(table.notes(context));
    lines
}

/// A function.
struct Function {
    name: String,
    /// All samples of stacks through it.
    pool: Pool,
    /// Estimate of what it allocates without a further call.
    itself: f64,
}

/// Functions, those with the most allocated through them first.
fn functions(context: &Context) -> Vec<Function> {
    let interned = Interned::new(context.profile);
    let mut numbers: HashMap<String, usize> = HashMap::new();
    let mut functions: Vec<Function> = Vec::new();
    let function_of_frame: Vec<usize> = interned
        .frames
        .iter()
        .map(|frame| {
            let name = chain::call(context.profile, frame).name;
            *numbers.entry(name.clone()).or_insert_with(|| {
                functions.push(Function { name, pool: Pool::default(), itself: 0.0 });
                functions.len() - 1
            })
        })
        .collect();
    let of_stack: Vec<(Vec<usize>, Option<usize>)> = (0..interned.stacks.len() as u32)
        .map(|stack| {
            let skipped = chain::allocator_frames(interned.stacks[stack as usize].stack);
            let frames = &interned.frame_ids(stack)[skipped..];
            let mut through: Vec<usize> = frames.iter().map(|&frame| function_of_frame[frame as usize]).collect();
            let innermost = through.first().copied();
            // A recursive function counts once per stack.
            through.sort_unstable();
            through.dedup();
            (through, innermost)
        })
        .collect();
    for (row, &stack) in context.profile.rows.iter().zip(&interned.stack_of_row) {
        let (through, innermost) = &of_stack[stack as usize];
        for &function in through {
            functions[function].pool.add(row);
        }
        if let Some(function) = *innermost {
            functions[function].itself += context.sort.of(row);
        }
    }
    functions.retain(|function| function.pool.sums(context.sort).next().is_some());
    functions.iter_mut().for_each(|function| function.pool.allow_for(&context.intervals));
    let size = |function: &Function| function.pool.total(context.sort);
    functions.sort_by(|a, b| size(b).total_cmp(&size(a)).then_with(|| a.name.cmp(&b.name)));
    functions
}

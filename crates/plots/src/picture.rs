//! A figure as a file: SVG text, or the bytes of a PNG.

use plotters::backend::{BitMapBackend, SVGBackend};
use plotters::drawing::IntoDrawingArea;
use plotters::prelude::DrawingBackend;
use thiserror::Error;

use crate::draw::{self, SCALE};
use crate::figure::Figure;
use crate::letters;

/// PNG pixels per unit of the figure: sharp on a high-resolution screen and in print.
const PNG_SCALE: u32 = 2;
/// Pixels drawn per PNG pixel in each direction, before they are averaged.
const FINE: u32 = SCALE / PNG_SCALE;

/// In bitmaps, but not in SVG, plotters treats the top of a text's box as the top of its letters.
const PNG_LOWER: f64 = 0.17;

/// Why a picture could not be made.
#[derive(Debug, Error)]
pub enum PictureError {
    /// The font of this crate could not be read.
    #[error("the built-in font cannot be used")]
    Font,
    /// The drawing backend failed.
    #[error("cannot draw the picture: {0}")]
    Draw(String),
    /// The PNG encoder failed.
    #[error("cannot encode the picture as PNG: {0}")]
    Png(#[from] png::EncodingError),
}

impl Figure {
    /// The figure as an SVG file.
    ///
    /// # Errors
    /// The figure could not be drawn.
    pub fn svg(&self) -> Result<String, PictureError> {
        let (width, height) = draw::size(self);
        let mut svg = String::new();
        self.draw(SVGBackend::with_string(&mut svg, (width, height)), 0.0)?;
        // The backend draws with integer coordinates, so the picture is drawn large; viewers show it at its nominal
        // size.
        let (drawn, shown) = (
            format!("width=\"{width}\" height=\"{height}\" "),
            format!("width=\"{}\" height=\"{}\" ", width / SCALE, height / SCALE),
        );
        Ok(svg.replacen(&drawn, &shown, 1))
    }

    /// The figure as a PNG file.
    ///
    /// # Errors
    /// The figure could not be drawn or encoded.
    pub fn png(&self) -> Result<Vec<u8>, PictureError> {
        let (width, height) = draw::size(self);
        let mut pixels = vec![255; 3 * width as usize * height as usize];
        self.draw(BitMapBackend::with_buffer(&mut pixels, (width, height)), PNG_LOWER)?;
        let mut file = Vec::new();
        let mut encoder = png::Encoder::new(&mut file, width / FINE, height / FINE);
        encoder.set_color(png::ColorType::Rgb);
        encoder.set_depth(png::BitDepth::Eight);
        encoder.set_compression(png::Compression::High);
        let mut writer = encoder.write_header()?;
        writer.write_image_data(&averaged(&pixels, width as usize))?;
        writer.finish()?;
        Ok(file)
    }

    /// Draws the figure with a backend, which is complete afterwards. `lower`: see [`draw::draw`].
    fn draw<DB: DrawingBackend>(&self, backend: DB, lower: f64) -> Result<(), PictureError> {
        if !letters::register() {
            return Err(PictureError::Font);
        }
        let area = backend.into_drawing_area();
        let drawn = draw::draw(self, &area, lower).and_then(|()| area.present());
        drawn.map_err(|error| PictureError::Draw(error.to_string()))
    }
}

/// Scales the picture down: each pixel is the mean of a square of pixels.
fn averaged(pixels: &[u8], width: usize) -> Vec<u8> {
    let fine = FINE as usize;
    let rows = pixels.chunks_exact(3 * width * fine);
    let mut small = Vec::with_capacity(pixels.len() / (fine * fine));
    for row in rows {
        for x in 0..width / fine {
            for color in 0..3 {
                let of = |dy: usize, dx: usize| u32::from(row[3 * (dy * width + x * fine + dx) + color]);
                let sum: u32 =
                    (0..fine).flat_map(|dy| (0..fine).map(move |dx| (dy, dx))).map(|(dy, dx)| of(dy, dx)).sum();
                small.push((sum / (FINE * FINE)) as u8);
            }
        }
    }
    small
}

//! The page at `/` of the admin port: files that are part of this program.
//!
//! The page holds no data. It reads the admin API as any other client does, with the token that
//! its reader gives it, so these files need no guard. Nothing is built and nothing is loaded from
//! elsewhere: what the browser runs is what stands in `page/`.

use actix_web::web::{self, ServiceConfig};
use actix_web::{HttpRequest, HttpResponse};

/// Only files of this server, no inline script or style, and no text that becomes markup: what a
/// hostile name could reach for is switched off in the browser too.
const CONTENT_SECURITY_POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; \
    img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; \
    frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'";

const HTML: &str = "text/html; charset=utf-8";
const CSS: &str = "text/css; charset=utf-8";
const JAVASCRIPT: &str = "text/javascript; charset=utf-8";
const SVG: &str = "image/svg+xml";

/// Path, content type and body of each file.
const FILES: [(&str, &str, &str); 18] = [
    ("/", HTML, include_str!("../page/index.html")),
    ("/page/style.css", CSS, include_str!("../page/style.css")),
    ("/page/detail.css", CSS, include_str!("../page/detail.css")),
    ("/page/icon.svg", SVG, include_str!("../page/icon.svg")),
    (
        "/page/icon-failing.svg",
        SVG,
        include_str!("../page/icon-failing.svg"),
    ),
    ("/page/page.js", JAVASCRIPT, include_str!("../page/page.js")),
    ("/page/api.js", JAVASCRIPT, include_str!("../page/api.js")),
    ("/page/live.js", JAVASCRIPT, include_str!("../page/live.js")),
    ("/page/read.js", JAVASCRIPT, include_str!("../page/read.js")),
    (
        "/page/model.js",
        JAVASCRIPT,
        include_str!("../page/model.js"),
    ),
    (
        "/page/words.js",
        JAVASCRIPT,
        include_str!("../page/words.js"),
    ),
    (
        "/page/elements.js",
        JAVASCRIPT,
        include_str!("../page/elements.js"),
    ),
    (
        "/page/summary.js",
        JAVASCRIPT,
        include_str!("../page/summary.js"),
    ),
    (
        "/page/pairs.js",
        JAVASCRIPT,
        include_str!("../page/pairs.js"),
    ),
    (
        "/page/engines.js",
        JAVASCRIPT,
        include_str!("../page/engines.js"),
    ),
    (
        "/page/detail.js",
        JAVASCRIPT,
        include_str!("../page/detail.js"),
    ),
    (
        "/page/ranks.js",
        JAVASCRIPT,
        include_str!("../page/ranks.js"),
    ),
    (
        "/page/events.js",
        JAVASCRIPT,
        include_str!("../page/events.js"),
    ),
];

pub(crate) fn configure(config: &mut ServiceConfig) {
    for (path, ..) in FILES {
        config.service(web::resource(path).get(file));
    }
}

/// Whether a path, as it came, is one of these files.
pub(crate) fn is_file(path: &str) -> bool {
    FILES.iter().any(|(known, ..)| *known == path)
}

async fn file(request: HttpRequest) -> HttpResponse {
    let wanted = request.path();
    let Some((_, content_type, body)) = FILES.iter().find(|(path, ..)| *path == wanted) else {
        return HttpResponse::NotFound().finish();
    };
    HttpResponse::Ok()
        .content_type(*content_type)
        .insert_header(("content-security-policy", CONTENT_SECURITY_POLICY))
        .insert_header(("x-content-type-options", "nosniff"))
        .insert_header(("referrer-policy", "no-referrer"))
        // Another version of this server has other files under the same names.
        .insert_header(("cache-control", "no-cache"))
        .body(*body)
}

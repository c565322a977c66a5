//! The bootstrap server on a thread of this process.

use std::sync::{Mutex, PoisonError};

use bootstrap_server::config::Config;
use bootstrap_server::server::Server;
use clap::Parser;
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use tokio::sync::oneshot;

use crate::runtime;

/// Where prefill and decode ranks find each other: SGLang's bootstrap protocol, the admin API and
/// metrics, served by threads of this process until `stop`.
#[pyclass(module = "ferry", frozen)]
pub(crate) struct BootstrapServer {
    address: String,
    admin: String,
    running: Mutex<Option<Running>>,
}

struct Running {
    stop: oneshot::Sender<()>,
    has_ended: oneshot::Receiver<()>,
}

#[pymethods]
impl BootstrapServer {
    /// Binds `listen` for the ranks and `admin_listen` for operators (port 0 takes a free one) and
    /// serves. Registrations are kept in `data_dir`, which only one server may use; without one
    /// they are gone with the server.
    #[new]
    #[pyo3(signature = (listen = "127.0.0.1:0", *, admin_listen = "127.0.0.1:0", data_dir = None))]
    fn new(
        py: Python<'_>,
        listen: &str,
        admin_listen: &str,
        data_dir: Option<&str>,
    ) -> PyResult<Self> {
        let mut arguments = vec!["", "--listen", listen, "--admin-listen", admin_listen];
        match data_dir {
            Some(folder) => arguments.extend(["--data-dir", folder]),
            None => arguments.extend(["--store", "memory"]),
        }
        let config = Config::try_parse_from(arguments)
            .map_err(|error| PyValueError::new_err(error.to_string()))?;
        let server = py
            .detach(|| Server::bind(config))
            .map_err(|error| PyRuntimeError::new_err(error.to_string()))?;
        let address = server
            .engines()
            .next()
            .map(|(_, address)| address.to_string());
        let admin = server.admin().to_string();
        let (stop, stopped) = oneshot::channel::<()>();
        let (ended, has_ended) = oneshot::channel();
        let spawned = runtime::arbiter()?.spawn_fn(move || {
            actix_rt::spawn(async move {
                let stop = async {
                    // It is stopped when it is told to, and when nobody can tell it any more.
                    let _ = stopped.await;
                };
                if let Err(error) = server.run(stop).await {
                    tracing::error!(%error, "the bootstrap server has ended");
                }
                let _ = ended.send(());
            });
        });
        if !spawned {
            return Err(PyRuntimeError::new_err("the ranks' thread has ended"));
        }
        Ok(Self {
            address: address.unwrap_or_default(),
            admin,
            running: Mutex::new(Some(Running { stop, has_ended })),
        })
    }

    /// Where ranks reach it, `host:port`.
    #[getter]
    fn address(&self) -> &str {
        &self.address
    }

    /// Where operators reach it: the admin API, the page and `/metrics`.
    #[getter]
    fn admin_address(&self) -> &str {
        &self.admin
    }

    /// Ends it; requests that have begun are answered.
    fn stop(&self, py: Python<'_>) -> PyResult<()> {
        let running = self
            .running
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        let Some(Running { stop, has_ended }) = running else {
            return Ok(());
        };
        // It may have ended by itself.
        let _ = stop.send(());
        runtime::run(py, move || async {
            let _ = has_ended.await;
        })
    }

    fn __enter__(this: PyRef<'_, Self>) -> PyRef<'_, Self> {
        this
    }

    #[pyo3(signature = (*_error))]
    fn __exit__(&self, py: Python<'_>, _error: &Bound<'_, pyo3::types::PyTuple>) -> PyResult<()> {
        self.stop(py)
    }

    fn __repr__(&self) -> String {
        format!("<BootstrapServer at {}>", self.address)
    }
}

"""Files behind a URL: bytes of S3, Google Cloud, HTTP and other stores, fetched by ranges through fsspec."""

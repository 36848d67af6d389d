from vireo.train import main

raise SystemExit(main())

from vireo.train_async import main

raise SystemExit(main())
